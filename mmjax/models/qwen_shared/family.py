# SPDX-License-Identifier: Apache-2.0
"""A family of a vision tower of its own, the Qwen2 decoder and the Qwen2-VL processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmjax.models.decoder.family import decoder_family
from mmjax.models.family import About, Family, Weight
from mmjax.models.qwen_shared.config import QwenConfig
from mmjax.models.qwen_shared.processing import QwenProcessor
from mmjax.models.qwen_shared.weights import canonical_name


def qwen_family(
    name: str,
    *,
    title: str,
    config: Callable[[dict], QwenConfig],
    vision_spec: Callable[[QwenConfig], dict],
    weights: Callable[[QwenConfig], tuple[Weight, ...]],
    encode: Callable[..., Any],
) -> Family:
    """The record of the family `name`, which is also its `model_type`; arguments as in `About` and `decoder_family`."""
    return decoder_family(
        name,
        config=config,
        vision_spec=vision_spec,
        weights=weights,
        canonical_name=canonical_name,
        encode=encode,
        processor=QwenProcessor.from_checkpoint,
        about=About(title, lacks=("sliding-window attention", "stretched rotary positions (YaRN)")),
    )
