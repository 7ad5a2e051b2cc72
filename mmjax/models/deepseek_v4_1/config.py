# SPDX-License-Identifier: Apache-2.0
"""Config of DeepSeek-V4.1, read from a checkpoint's config.json: the tower, and what ties it to the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.deepseek_v4_1.grid import GridRule
from mmjax.models.deepseek_v4_1.text_config import DeepseekTextConfig, text_config
from mmjax.models.hf_config import ConfigSection, compute_dtype
from mmjax.models.images.normalisation import CHANNELS
from mmjax.models.vlm import VLMConfig

IMAGE_TOKEN_ID = 129264
LEAST_SPAN = 4


@dataclass(frozen=True)
class DeepseekVisionConfig:
    """The tower, none if `depth` is 0. A cell of `merge` x `merge` patches makes one row; learned rows come on top."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    merge: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        return CHANNELS * self.patch_size**2

    @property
    def grid_rule(self) -> GridRule:
        return GridRule(self.patch_size, self.merge, self.max_image_tokens, self.min_pixels, self.max_wh_ratio)


@dataclass(frozen=True)
class DeepseekV41Config(VLMConfig):
    """DeepSeek-V4.1: a tower for still pictures and the DeepSeek-V4 decoder."""

    text: DeepseekTextConfig
    vision: DeepseekVisionConfig
    image_token_id: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> DeepseekV41Config:
        """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key."""
        top = ConfigSection(hf)
        text = top.section("text_config") if "text_config" in top else top
        config = text_config(text)
        image_token_id = top.integer("image_token_id", IMAGE_TOKEN_ID)
        if not 0 <= image_token_id < config.vocab_size:
            raise top.error("image_token_id", f"{image_token_id} lies outside the vocabulary of {config.vocab_size}")
        return cls(
            text=config,
            vision=_vision_config(top.section("vision_config") if "vision_config" in top else ConfigSection({})),
            dtype=compute_dtype(top, text),
            image_token_id=image_token_id,
        )


def _vision_config(v: ConfigSection) -> DeepseekVisionConfig:
    depth = v.integer("num_hidden_layers", 32)
    if depth < 0:
        raise v.error("num_hidden_layers", f"must be 0 or more, got {depth}")
    width, heads = v.integer("hidden_size", 1024), v.integer("num_attention_heads", 16)
    if width % (4 * heads):
        raise v.error("num_attention_heads", f"{heads} must divide hidden_size {width} into heads of a multiple of 4")
    span, pixels = v.integer("max_image_tokens", 1024), v.integer("min_pixels", 295936)
    if span < LEAST_SPAN:
        raise v.error("max_image_tokens", f"must be {LEAST_SPAN} or more, got {span}")
    if pixels < 0:
        raise v.error("min_pixels", f"must be 0 or more, got {pixels}")
    ratio = v.number("max_wh_ratio") if "max_wh_ratio" in v else None
    if ratio is not None and ratio <= 0:
        raise v.error("max_wh_ratio", f"must be positive, got {ratio}")
    return DeepseekVisionConfig(
        depth=depth,
        hidden_size=width,
        num_heads=heads,
        intermediate_size=v.integer("intermediate_size", 2816),
        patch_size=v.integer("patch_size", 14),
        rope_theta=v.number("rope_theta", 10000.0),
        merge=v.integer("downsample_ratio", 3),
        max_image_tokens=span,
        min_pixels=pixels,
        max_wh_ratio=ratio,
        norm_eps=v.number("rms_norm_eps", 1e-6),
    )
