# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL."""

from __future__ import annotations

from mmjax.models.qwen2_5_vl.config import Qwen25VLConfig
from mmjax.models.qwen2_5_vl.vision import encode, vision_spec
from mmjax.models.qwen2_5_vl.weights import weights
from mmjax.models.qwen_shared.family import qwen_family

FAMILY = qwen_family(
    "qwen2_5_vl",
    title="Qwen2.5-VL",
    config=Qwen25VLConfig.from_hf,
    vision_spec=vision_spec,
    weights=weights,
    encode=encode,
)
