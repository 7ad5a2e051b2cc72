# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL."""

from __future__ import annotations

from mmjax.models.decoder.family import decoder_family
from mmjax.models.family import About
from mmjax.models.qwen3_vl.config import Qwen3VLConfig
from mmjax.models.qwen3_vl.processing import Qwen3VLProcessor
from mmjax.models.qwen3_vl.vision import encode, vision_spec
from mmjax.models.qwen3_vl.vision_inputs import qwen3_vl_input_shapes
from mmjax.models.qwen3_vl.weights import canonical_name, weights

FAMILY = decoder_family(
    "qwen3_vl",
    config=Qwen3VLConfig.from_hf,
    vision_spec=vision_spec,
    vision_inputs=qwen3_vl_input_shapes,
    weights=weights,
    canonical_name=canonical_name,
    encode=encode,
    processor=Qwen3VLProcessor.from_checkpoint,
    about=About("Qwen3-VL", lacks=("stretched rotary positions (YaRN)",)),
)
