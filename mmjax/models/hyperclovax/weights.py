# SPDX-License-Identifier: Apache-2.0
"""Weight table of HyperCLOVAX vision, in the names of the published checkpoint."""

from __future__ import annotations

from dataclasses import replace

from mmjax.models.decoder.weights import text_weights
from mmjax.models.family import Weight
from mmjax.models.hyperclovax.config import HyperClovaXConfig
from mmjax.models.qwen2_5_vl.weights import tower_weights

_TEXT = "model.language_model."  # before "model." and "lm_head." of the decoder
_TOWER = "model.vision_model."


def canonical_name(name: str) -> str:
    """The published name of a tensor, also of one that transformers saved anew or holds in memory."""
    if name.startswith(_TEXT) and not name.startswith((f"{_TEXT}model.", f"{_TEXT}lm_head.")):
        return f"{_TEXT}model.{name.removeprefix(_TEXT)}"
    if name.startswith("lm_head."):
        return _TEXT + name
    return name.replace("model.projector.", "model.vision_projector.", 1)


def weights(cfg: HyperClovaXConfig) -> tuple[Weight, ...]:
    """Every leaf of the parameter tree and the checkpoint tensors it is made of."""
    width = cfg.hidden_size
    tower = [
        replace(weight, sources=tuple(name.replace("visual.", _TOWER, 1) for name in weight.sources))
        for weight in tower_weights(cfg.vision)
    ]
    return (
        *tower,
        Weight("vision.projector", ("model.vision_projector.weight",), ((width, cfg.vision.out_hidden_size),)),
        Weight("vision.projector_bias", ("model.vision_projector.bias",), ((width,),)),
        *text_weights(cfg.text, model=f"{_TEXT}model", head=f"{_TEXT}lm_head"),
    )
