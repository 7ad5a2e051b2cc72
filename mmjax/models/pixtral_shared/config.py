# SPDX-License-Identifier: Apache-2.0
"""Configs of models that join a Pixtral tower to the Mistral decoder, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.decoder.config import decoder_config
from mmjax.models.hf_config import ConfigSection, compute_dtype, padded_mlp_width
from mmjax.models.images.normalisation import CHANNELS
from mmjax.models.vlm import VLMConfig

# What files leave out has the values of transformers' classes; published checkpoints do leave out sizes.
_TOWER_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": CHANNELS,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_TEXT_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,  # files that want none say null
}


@dataclass(frozen=True, kw_only=True)
class PixtralVisionConfig:
    """The tower and its projector. `hidden_size` is the tower's width, `out_hidden_size` that of the rows it returns.

    Attributes:
      merge: patches along one side of the block that makes one row; 1 without a patch merger.
      merger_norm_eps: epsilon of the norm in front of the patch merger; None: there is no merger.
      projector_bias: whether the projector's two layers have biases.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    merge: int
    merger_norm_eps: float | None
    projector_bias: bool
    hidden_act: str
    rope_theta: float
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Width of the loaded MLP matrices, `intermediate_size` padded."""
        return padded_mlp_width(self.intermediate_size)

    @property
    def patch_values(self) -> int:
        return CHANNELS * self.patch_size**2


@dataclass(frozen=True)
class PixtralConfig(VLMConfig):
    """A Pixtral tower and the Mistral decoder."""

    vision: PixtralVisionConfig
    image_token_id: int


def read_config(
    hf: Mapping[str, Any],
    *,
    tie_word_embeddings: bool,
    merge: int,
    patch_merger: bool,
    projector_bias: bool,
    image_token: int,
    feature_layer: int,
) -> PixtralConfig:
    """The config of either family.

    Args:
      merge: patches along one side of a block that makes one row.
      patch_merger: whether a learned merger makes those blocks to rows.
      projector_bias, image_token, feature_layer: defaults of the class for what the file may say.

    Raises:
      CheckpointError: a key is missing, or asks for something that is not supported; the text names it.
    """
    top = ConfigSection(hf)
    text = _section(top, "text_config", "mistral", _TEXT_DEFAULTS)
    decoder = decoder_config(text, tie_word_embeddings=tie_word_embeddings)
    top.choice("projector_hidden_act", ("gelu",), "gelu")
    vision = _vision_config(
        _section(top, "vision_config", "pixtral", _TOWER_DEFAULTS),
        out_hidden_size=decoder.hidden_size,
        merge=merge,
        merger_norm_eps=decoder.rms_norm_eps if patch_merger else None,
        projector_bias=top.flag("multimodal_projector_bias", projector_bias),
    )
    layer = top.integer("vision_feature_layer", feature_layer)
    if layer not in (-1, vision.depth):
        raise top.error("vision_feature_layer", f"is {layer}; rows are made from the tower's last layer, -1")
    index = "image_token_index" if "image_token_index" in top else "image_token_id"
    return PixtralConfig(
        text=decoder, vision=vision, dtype=compute_dtype(top, text), image_token_id=top.integer(index, image_token)
    )


def _section(top: ConfigSection, key: str, model_type: str, defaults: Mapping[str, Any]) -> ConfigSection:
    """The object under `key`, completed with `defaults`; its `model_type` must be the given one if it has any."""
    section = top.section(key)
    section.choice("model_type", (model_type,), model_type)
    return section.with_defaults(defaults)


def _vision_config(v: ConfigSection, **fields: Any) -> PixtralVisionConfig:
    width, heads = v.integer("hidden_size"), v.integer("num_attention_heads")
    if heads < 1 or width % (4 * heads):
        raise v.error("num_attention_heads", f"{heads} must divide hidden_size {width} into heads of a multiple of 4")
    if v.integer("head_dim", width // heads) != width // heads:
        raise v.error("head_dim", f"is {v.integer('head_dim')}; hidden_size and heads make it {width // heads}")
    if v.integer("num_channels") != CHANNELS:
        raise v.error("num_channels", f"is {v.integer('num_channels')}, expected {CHANNELS}")
    return PixtralVisionConfig(
        depth=v.integer("num_hidden_layers"),
        hidden_size=width,
        intermediate_size=v.integer("intermediate_size"),
        num_heads=heads,
        patch_size=v.integer("patch_size"),
        hidden_act=v.choice("hidden_act", ("gelu", "silu")),
        rope_theta=_rope_theta(v),
        **fields,
    )


def _rope_theta(vision: ConfigSection) -> float:
    """Base of the axial rotary angles, in `rope_parameters` (transformers 5) or beside the sizes (older)."""
    if "rope_parameters" not in vision:
        return vision.number("rope_theta", 10000.0)
    rope = vision.section("rope_parameters")
    rope.choice("rope_type", ("axial", "default"), "axial")
    return rope.number("rope_theta", 10000.0)
