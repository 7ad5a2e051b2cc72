# SPDX-License-Identifier: Apache-2.0
"""Config of Qwen2.5-VL, read from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.hf_config import ConfigSection, padded_mlp_width
from mmjax.models.qwen_shared.config import QwenConfig, shared_fields, vision_rope_theta


@dataclass(frozen=True)
class Qwen25VLVisionConfig:
    """The tower. `window_size` is in pixels; `full_attention_blocks` see a whole frame, the others one window."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    in_channels: int
    merge: int
    window_size: int
    full_attention_blocks: tuple[int, ...]
    tokens_per_second: float
    hidden_act: str
    rope_theta: float
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Width of the loaded MLP matrices, `intermediate_size` padded."""
        return padded_mlp_width(self.intermediate_size)

    @property
    def window_merged(self) -> int:
        """Merge blocks along one side of a window."""
        return self.window_size // self.merge // self.patch_size


@dataclass(frozen=True)
class Qwen25VLConfig(QwenConfig):
    """Qwen2.5-VL: RMSNorm tower with windowed attention in most blocks, Qwen2 decoder."""

    vision: Qwen25VLVisionConfig

    @property
    def window_capacity(self) -> int:
        return (self.vision.window_merged * self.vision.merge) ** 2

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen25VLConfig:
        """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key."""
        shared = shared_fields(hf)
        v = ConfigSection(hf).section("vision_config")
        out = v.integer("out_hidden_size")
        if out != shared["text"].hidden_size:
            raise v.error("out_hidden_size", f"{out} differs from the text hidden_size {shared['text'].hidden_size}")
        vision = Qwen25VLVisionConfig(
            depth=v.integer("depth"),
            hidden_size=v.integer("hidden_size"),
            intermediate_size=v.integer("intermediate_size"),
            num_heads=v.integer("num_heads"),
            out_hidden_size=out,
            patch_size=v.integer("patch_size"),
            temporal_patch_size=v.integer("temporal_patch_size"),
            in_channels=v.integer("in_channels", 3),
            merge=v.integer("spatial_merge_size"),
            window_size=v.integer("window_size"),
            full_attention_blocks=v.integers("fullatt_block_indexes"),
            tokens_per_second=v.number("tokens_per_second"),
            hidden_act=v.choice("hidden_act", ("silu", "gelu", "quick_gelu"), "silu"),
            rope_theta=vision_rope_theta(v),
        )
        if vision.window_merged < 1:
            raise v.error("window_size", f"{vision.window_size} is smaller than one merge block")
        return cls(vision=vision, **shared)
