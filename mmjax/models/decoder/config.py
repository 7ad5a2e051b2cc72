# SPDX-License-Identifier: Apache-2.0
"""Config of the shared text decoder, read from config.json. What the decoder cannot do is refused here, by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmjax.models.hf_config import ConfigSection, padded_mlp_width


@dataclass(frozen=True)
class MoeConfig:
    """Mixture-of-experts MLPs: each token takes the `experts_per_token` experts that its router scores highest.

    Attributes:
      intermediate_size: MLP width of one expert.
      norm_topk: whether the chosen experts' weights are scaled to sum to one.
      sparse_layers: the layers that have experts; the others keep their dense MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool
    sparse_layers: tuple[int, ...]


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder.

    Attributes:
      mrope_section: how many rotary pairs follow each position axis; empty with one axis only.
      mrope_interleaved: pairs take the axes in turn, not in one block an axis.
      deepstack_layers: layers after which deepstack level 0, 1, ... is added.
      qkv_bias: whether the query, key and value projections have biases.
      qk_norm: whether every query and key head is RMS-normalised before it is turned.
      attention_scale: factor of the attention scores; None: head_dim ** -0.5.
      embedding_multiplier: factor of everything that enters the first layer, embedding rows included.
      residual_multiplier: factor of every branch before it is added.
      logits_scaling: factor of the logits.
      post_norms: whether every branch is RMS-normalised before it is added.
      moe: experts, where there are any.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    mrope_interleaved: bool = False
    deepstack_layers: tuple[int, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    post_norms: bool = False
    moe: MoeConfig | None = None

    @property
    def mlp_width(self) -> int:
        """Width of the loaded MLP matrices, `intermediate_size` padded."""
        return padded_mlp_width(self.intermediate_size)

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def position_axes(self) -> int:
        return max(1, len(self.mrope_section))


def decoder_config(
    text: ConfigSection, *, mrope: bool = False, tie_word_embeddings: bool, window_flag: bool = False, **features: Any
) -> DecoderConfig:
    """The decoder that a section of config.json describes.

    Args:
      text: the section with the text model's keys.
      mrope: whether positions have several axes, whose sections the file must name; else plain rotary positions.
      tie_word_embeddings: read by the family, since checkpoints differ in where they say it.
      window_flag: `use_sliding_window` alone decides whether attention has a window (Qwen); else `sliding_window` does.
      features: the fields of `DecoderConfig` that have defaults, where the family sets them.

    Raises:
      CheckpointError: a key is missing, or asks for something that the decoder does not do.
    """
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads or ("head_dim" not in text and hidden % heads):
        raise text.error(
            "num_attention_heads",
            f"{heads} must divide hidden_size {hidden} and be a multiple of num_key_value_heads {kv_heads}",
        )
    head_dim = text.integer("head_dim", hidden // heads)
    _refuse(text, window_flag)
    theta, section = _rope(text, mrope, features.get("mrope_interleaved", False))
    if mrope and 2 * sum(section) != head_dim:
        raise text.error("mrope_section", f"{list(section)} must sum to half the head size, {head_dim // 2}")
    return DecoderConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=text.integer("intermediate_size"),
        num_layers=text.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=text.number("rms_norm_eps"),
        rope_theta=theta,
        mrope_section=section,
        max_position_embeddings=text.integer("max_position_embeddings"),
        tie_word_embeddings=tie_word_embeddings,
        **features,
    )


def _refuse(text: ConfigSection, window_flag: bool) -> None:
    """Everything but rotary positions that descendants of LLaMA may have and this decoder has not."""
    text.choice("hidden_act", ("silu",))
    unsupported = "; sliding-window attention is not supported"
    if text.flag("use_sliding_window", False):
        raise text.error("use_sliding_window", f"is true{unsupported}")
    if not window_flag and "sliding_window" in text and "use_sliding_window" not in text:
        raise text.error("sliding_window", f"is {text.integer('sliding_window')}{unsupported}")
    text.choices("layer_types", ("full_attention",))
    for name in ("attention_bias", "mlp_bias"):
        if text.flag(name, False):
            raise text.error(name, "is true; those biases are not supported")


def _rope(text: ConfigSection, mrope: bool, interleaved: bool) -> tuple[float, tuple[int, ...]]:
    """Base and sections, from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (older)."""
    key = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    if not mrope and key not in text:
        return text.number("rope_theta"), ()
    rope = text.section(key)
    kinds = ("default", "mrope") if mrope else ("default",)
    for name in ("rope_type", "type"):
        rope.choice(name, kinds, "default")
    if rope.number("partial_rotary_factor", 1.0) != 1:
        raise rope.error("partial_rotary_factor", "is not 1; heads are turned as a whole")
    if rope.flag("mrope_interleaved", interleaved) != interleaved:
        raise rope.error("mrope_interleaved", f"must be {str(interleaved).lower()} in this family")
    if not mrope and "mrope_section" in rope:
        raise rope.error("mrope_section", "is given, but positions have one axis in this family")
    source = rope if "rope_theta" in rope else text
    return source.number("rope_theta"), rope.integers("mrope_section") if mrope else ()
