# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL."""

from __future__ import annotations

from mmjax.models.family import Family
from mmjax.models.qwen2_vl.config import Qwen2VLConfig
from mmjax.models.qwen2_vl.vision import encode, vision_spec
from mmjax.models.qwen2_vl.weights import weights
from mmjax.models.qwen_shared import text
from mmjax.models.qwen_shared.processing import QwenProcessor
from mmjax.models.qwen_shared.weights import canonical_name
from mmjax.models.vision_inputs import vision_input_shapes


def spec(cfg: Qwen2VLConfig) -> dict:
    """Shapes and dtypes of the whole parameter tree."""
    return {"vision": vision_spec(cfg), "text": text.text_spec(cfg)}


def deepstack_layers(cfg: Qwen2VLConfig) -> tuple[int, ...]:
    """Text layers after which rows of the tower are added again: none in this family."""
    return cfg.text.deepstack_layers


FAMILY = Family(
    name="qwen2_vl",
    model_types=("qwen2_vl",),
    config=Qwen2VLConfig.from_hf,
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
    deepstack_layers=deepstack_layers,
)
