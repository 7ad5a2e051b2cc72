# SPDX-License-Identifier: Apache-2.0
"""Config of Qwen2-VL, read from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.hf_config import ConfigSection, padded_mlp_width
from mmjax.models.qwen_shared.config import QwenConfig, shared_fields, vision_rope_theta


@dataclass(frozen=True)
class Qwen2VLVisionConfig:
    """The tower. `hidden_size` is its width, `out_hidden_size` the width of the rows it returns."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    in_channels: int
    merge: int
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


@dataclass(frozen=True)
class Qwen2VLConfig(QwenConfig):
    """Qwen2-VL: LayerNorm tower with full attention per frame, Qwen2 decoder."""

    vision: Qwen2VLVisionConfig

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen2VLConfig:
        """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key."""
        shared = shared_fields(hf)
        v = ConfigSection(hf).section("vision_config")
        width = v.integer("embed_dim")
        out = v.integer("hidden_size")
        if out != shared["text"].hidden_size:
            raise v.error("hidden_size", f"{out} differs from the text hidden_size {shared['text'].hidden_size}")
        vision = Qwen2VLVisionConfig(
            depth=v.integer("depth"),
            hidden_size=width,
            intermediate_size=int(width * v.number("mlp_ratio")),
            num_heads=v.integer("num_heads"),
            out_hidden_size=out,
            patch_size=v.integer("patch_size"),
            temporal_patch_size=v.integer("temporal_patch_size"),
            in_channels=v.integer("in_channels", 3),
            merge=v.integer("spatial_merge_size"),
            hidden_act=v.choice("hidden_act", ("quick_gelu", "gelu", "silu"), "quick_gelu"),
            rope_theta=vision_rope_theta(v),
        )
        return cls(vision=vision, **shared)
