# SPDX-License-Identifier: Apache-2.0
"""Pixtral-12B, whose checkpoints name the LLaVA class: a Pixtral tower, one row a patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.models.family import About
from mmjax.models.hf_config import ConfigSection
from mmjax.models.pixtral_shared.config import PixtralConfig, read_config
from mmjax.models.pixtral_shared.family import pixtral_family


def config(hf: Mapping[str, Any]) -> PixtralConfig:
    """From the parsed config.json. Raises CheckpointError for a LLaVA with another tower, and as Mistral3's."""
    top = ConfigSection(hf)
    top.section("vision_config").choice("model_type", ("pixtral",), "clip_vision_model")
    text = top.section("text_config")
    text.choice("model_type", ("mistral",), "llama")
    # "default" drops the first patch of every picture, which is how towers with a class token are used.
    top.choice("vision_feature_select_strategy", ("full",), "default")
    return read_config(
        hf,
        tie_word_embeddings=top.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False),
        merge=1,
        patch_merger=False,
        projector_bias=True,
        image_token=32000,
        feature_layer=-2,
    )


FAMILY = pixtral_family(
    "pixtral",
    model_type="llava",
    config=config,
    about=About("Pixtral-12B", lacks=("LLaVA models with another tower or decoder", "sliding-window attention")),
)
