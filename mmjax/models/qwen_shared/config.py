# SPDX-License-Identifier: Apache-2.0
"""Config of the Qwen2 text decoder, and what the configs of the families built on it share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.hf_config import ConfigSection, compute_dtype, padded_mlp_width


@dataclass(frozen=True)
class QwenTextConfig:
    """The decoder. `mrope_section`: how many rotary pairs follow each position axis, in blocks."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    deepstack_layers: tuple[int, ...] = ()  # layers after which deepstack level 0, 1, ... is added

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Width of the loaded MLP matrices, `intermediate_size` padded."""
        return padded_mlp_width(self.intermediate_size)

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


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
class QwenConfig:
    """A vision-language model around the Qwen2 decoder; families add their `vision` config."""

    text: QwenTextConfig
    vision: QwenVisionConfig
    dtype: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.text.hidden_size

    @property
    def row_width(self) -> int:
        return self.text.hidden_size * (1 + len(self.text.deepstack_layers))

    @property
    def num_layers(self) -> int:
        return self.text.num_layers

    @property
    def num_heads(self) -> int:
        return self.text.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.text.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.text.head_dim

    @property
    def position_axes(self) -> int:
        return len(self.text.mrope_section)

    @property
    def max_position_embeddings(self) -> int:
        return self.text.max_position_embeddings

    @property
    def vision_head_dim(self) -> int:
        return self.vision.head_dim

    @property
    def merge(self) -> int:
        """Patches that make one embedding row."""
        return self.vision.merge**2

    @property
    def patch_values(self) -> int:
        return self.vision.patch_values

    @property
    def window_capacity(self) -> int:
        return 0


def shared_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Every `QwenConfig` field but `vision`, from a config.json of either layout (nested or flat text keys)."""
    top = ConfigSection(hf)
    text = top.section("text_config") if "text_config" in top else top
    return {
        "text": _text_config(top, text),
        "dtype": compute_dtype(top, text),
        "image_token_id": top.integer("image_token_id"),
        "video_token_id": top.integer("video_token_id"),
        "vision_start_token_id": top.integer("vision_start_token_id"),
        "vision_end_token_id": top.integer("vision_end_token_id"),
    }


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
        "hidden_act": v.choice("hidden_act", ("quick_gelu", "gelu", "silu"), act),
        "rope_theta": _vision_rope_theta(v),
    }


def _vision_rope_theta(vision: ConfigSection) -> float:
    """Base of the tower's axial rotary angles; checkpoints older than transformers 5 do not store it."""
    if "rope_parameters" not in vision:
        return 10000.0
    rope = vision.section("rope_parameters")
    rope.choice("rope_type", ("axial", "default"), "axial")
    return rope.number("rope_theta", 10000.0)


def _text_config(top: ConfigSection, text: ConfigSection) -> QwenTextConfig:
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", heads)
    if hidden % heads or heads % kv_heads:
        raise text.error("num_attention_heads", f"{heads} must divide hidden_size {hidden} and by {kv_heads} KV heads")
    text.choice("hidden_act", ("silu",))
    if text.flag("use_sliding_window", False):
        raise text.error("use_sliding_window", "is true; sliding-window attention is not supported")
    theta, section = _rope(text)
    if 2 * sum(section) != hidden // heads:
        raise text.error("mrope_section", f"{list(section)} must sum to half the head size, {hidden // heads // 2}")
    return QwenTextConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=text.integer("intermediate_size"),
        num_layers=text.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        rms_norm_eps=text.number("rms_norm_eps"),
        rope_theta=theta,
        mrope_section=section,
        max_position_embeddings=text.integer("max_position_embeddings"),
        tie_word_embeddings=top.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False),
    )


def _rope(text: ConfigSection) -> tuple[float, tuple[int, ...]]:
    """Base and sections, from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (older)."""
    rope = text.section("rope_parameters" if "rope_parameters" in text else "rope_scaling")
    for key in ("rope_type", "type"):
        rope.choice(key, ("default", "mrope"), "default")
    source = rope if "rope_theta" in rope else text
    return source.number("rope_theta"), rope.integers("mrope_section")
