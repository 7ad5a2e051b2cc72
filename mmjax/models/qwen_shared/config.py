# SPDX-License-Identifier: Apache-2.0
"""What the configs of the Qwen2-VL families share: towers, placeholder ids, and the Qwen2 decoder's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.decoder.config import decoder_config
from mmjax.models.hf_config import ConfigSection, compute_dtype, padded_mlp_width
from mmjax.models.vlm import VLMConfig


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig:
    """What the towers share. `hidden_size` is the tower's width, `out_hidden_size` that of the rows it returns."""

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

    @property
    def patch_values(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class QwenConfig(VLMConfig):
    """A vision-language model around the Qwen2 decoder; families add their `vision` config."""

    vision: QwenVisionConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """Ids that only items may bring into a context."""
        return (self.image_token_id, self.video_token_id, self.vision_start_token_id, self.vision_end_token_id)


def shared_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Every `QwenConfig` field but `vision`, from a config.json of either layout (nested or flat text keys)."""
    top = ConfigSection(hf)
    text = top.section("text_config") if "text_config" in top else top
    tie = top.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    return {
        "text": decoder_config(text, mrope=True, tie_word_embeddings=tie, window_flag=True, qkv_bias=True),
        "dtype": compute_dtype(top, text),
        **token_fields(top),
    }


def token_fields(top: ConfigSection) -> dict[str, int]:
    """The ids of a `QwenConfig`, from the top level of config.json."""
    kinds = ("image", "video", "vision_start", "vision_end")
    return {f"{kind}_token_id": top.integer(f"{kind}_token_id") for kind in kinds}


def vision_fields(v: ConfigSection, *, width_key: str, out_key: str, text_width: int, act: str) -> dict[str, Any]:
    """Every `QwenVisionConfig` field but `intermediate_size`; families name the widths differently.

    Args:
      act: the activation where the checkpoint names none.
    """
    width, heads, out = v.integer(width_key), v.integer("num_heads"), v.integer(out_key)
    if width % (4 * heads):
        raise v.error("num_heads", f"{heads} must divide {width_key} {width} into heads of a multiple of 4")
    if out != text_width:
        raise v.error(out_key, f"{out} differs from the text hidden_size {text_width}")
    return {
        "depth": v.integer("depth"),
        "hidden_size": width,
        "num_heads": heads,
        "out_hidden_size": out,
        "patch_size": v.integer("patch_size"),
        "temporal_patch_size": v.integer("temporal_patch_size"),
        "in_channels": v.integer("in_channels", 3),
        "merge": v.integer("spatial_merge_size"),
        "hidden_act": v.choice("hidden_act", ("quick_gelu", "gelu", "gelu_pytorch_tanh", "silu"), act),
        "rope_theta": _vision_rope_theta(v),
    }


def _vision_rope_theta(vision: ConfigSection) -> float:
    """Base of the tower's axial rotary angles; checkpoints older than transformers 5 do not store it."""
    if "rope_parameters" not in vision:
        return 10000.0
    rope = vision.section("rope_parameters")
    rope.choice("rope_type", ("axial", "default"), "axial")
    return rope.number("rope_theta", 10000.0)
