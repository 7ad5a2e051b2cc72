# SPDX-License-Identifier: Apache-2.0
"""Config of Qwen2-VL, read from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.hf_config import ConfigSection
from mmjax.models.qwen_shared.config import QwenConfig, QwenVisionConfig, shared_fields, vision_fields


@dataclass(frozen=True)
class Qwen2VLConfig(QwenConfig):
    """Qwen2-VL: LayerNorm tower with full attention per frame, Qwen2 decoder."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen2VLConfig:
        """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key."""
        shared = shared_fields(hf)
        v = ConfigSection(hf).section("vision_config")
        fields = vision_fields(
            v, width_key="embed_dim", out_key="hidden_size", text_width=shared["text"].hidden_size, act="quick_gelu"
        )
        mlp_width = int(fields["hidden_size"] * v.number("mlp_ratio"))
        return cls(vision=QwenVisionConfig(intermediate_size=mlp_width, **fields), **shared)
