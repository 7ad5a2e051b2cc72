# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL with a mixture of experts: the tower and the prompts of Qwen3-VL, another MLP in the decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.models import qwen3_vl
from mmjax.models.qwen3_vl_moe.config import config_from_hf
from mmjax.models.qwen3_vl_moe.weights import outputs_first

FAMILY = replace(
    qwen3_vl.FAMILY,
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe",),
    config=config_from_hf,
    other_layouts=outputs_first,
    about=replace(qwen3_vl.FAMILY.about, title="Qwen3-VL-MoE"),
)
