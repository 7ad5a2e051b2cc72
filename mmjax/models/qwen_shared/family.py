# SPDX-License-Identifier: Apache-2.0
"""A family of a vision tower of its own, the Qwen2 decoder and the Qwen2-VL processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmjax.models.family import Family, Weight
from mmjax.models.qwen_shared import text
from mmjax.models.qwen_shared.config import QwenConfig
from mmjax.models.qwen_shared.processing import QwenProcessor
from mmjax.models.qwen_shared.weights import canonical_name
from mmjax.models.vision_inputs import vision_input_shapes


def qwen_family(
    name: str,
    *,
    config: Callable[[dict], QwenConfig],
    vision_spec: Callable[[QwenConfig], dict],
    weights: Callable[[QwenConfig], tuple[Weight, ...]],
    encode: Callable[..., Any],
) -> Family:
    """The record of the family `name`, which is also its `model_type`; the arguments are as in `Family`.

    Args:
      vision_spec: shapes of the tower's parameters; the decoder's are added.
    """

    def spec(cfg: QwenConfig) -> dict:
        return {"vision": vision_spec(cfg), "text": text.text_spec(cfg)}

    return Family(
        name=name,
        model_types=(name,),
        config=config,
        spec=spec,
        weights=weights,
        canonical_name=canonical_name,
        vision_inputs=vision_input_shapes,
        encode=encode,
        embed=text.embed,
        forward=text.forward,
        layer_outputs=text.layer_outputs,
        logits=text.logits,
        processor=QwenProcessor.from_checkpoint,
        deepstack_layers=_deepstack_layers,
    )


def _deepstack_layers(cfg: QwenConfig) -> tuple[int, ...]:
    return cfg.text.deepstack_layers
