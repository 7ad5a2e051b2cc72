# SPDX-License-Identifier: Apache-2.0
"""Config of Qwen2.5-VL, read from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.hf_config import ConfigSection
from mmjax.models.qwen_shared.config import QwenConfig, QwenVisionConfig, shared_fields, vision_fields


@dataclass(frozen=True, kw_only=True)
class Qwen25VLVisionConfig(QwenVisionConfig):
    """The tower. `window_size` is in pixels; `full_attention_blocks` see a whole frame, the others one window."""

    window_size: int
    full_attention_blocks: tuple[int, ...]
    tokens_per_second: float

    @property
    def window_merged(self) -> int:
        """Merge blocks along one side of a window."""
        return self.window_size // self.merge // self.patch_size

    @property
    def window_capacity(self) -> int:
        """Patches of one window."""
        return (self.window_merged * self.merge) ** 2

    @classmethod
    def from_section(cls, v: ConfigSection, out_width: int) -> Qwen25VLVisionConfig:
        """From the tower's section of config.json; `out_width` is what follows the tower. Raises CheckpointError."""
        fields = vision_fields(v, width_key="hidden_size", out_key="out_hidden_size", text_width=out_width, act="silu")
        vision = cls(
            intermediate_size=v.integer("intermediate_size"),
            window_size=v.integer("window_size"),
            full_attention_blocks=v.integers("fullatt_block_indexes"),
            tokens_per_second=v.number("tokens_per_second"),
            **fields,
        )
        if vision.window_merged < 1:
            raise v.error("window_size", f"{vision.window_size} is smaller than one merge block")
        return vision


@dataclass(frozen=True)
class Qwen25VLConfig(QwenConfig):
    """Qwen2.5-VL: RMSNorm tower with windowed attention in most blocks, Qwen2 decoder."""

    vision: Qwen25VLVisionConfig

    @property
    def window_capacity(self) -> int:
        return self.vision.window_capacity

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen25VLConfig:
        """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key."""
        shared = shared_fields(hf)
        v = ConfigSection(hf).section("vision_config")
        return cls(vision=Qwen25VLVisionConfig.from_section(v, shared["text"].hidden_size), **shared)
