# SPDX-License-Identifier: Apache-2.0
"""Config of the DeepSeek-V4 decoder, in the keys of transformers and in those of DeepSeek's own checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mmjax.models.hf_config import ConfigSection

# Kinds of attention: a sliding window alone, or with it one entry for each few or each many tokens of the past.
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASH, TOP_K = "hash_moe", "moe"

_RATES = {SPARSE: 4, HEAVY: 128}
_KIND_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
_SCORES = ("sqrtsoftplus", "softmax", "sigmoid")
# Parts of published or announced checkpoints that this decoder lacks; a config that asks for one can't be served.
_UNKNOWN_PARTS = ("engram", "dspark")


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies; with a `factor` they are stretched as YaRN does, without its change of scale."""

    theta: float
    factor: float | None = None
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class DeepseekTextConfig:
    """The decoder.

    Attributes:
      rope_dim: the last values of a head, which turn with the position.
      q_rank: width of the queries' bottleneck.
      o_groups, o_rank: the output projection's groups of heads, and the width of each group's bottleneck.
      layer_kinds: attention of each layer, SLIDING, SPARSE or HEAVY.
      sparse_rate, heavy_rate: tokens of one entry.
      index_heads, index_dim, index_topk: the scorer that picks which entries a token of a SPARSE layer sees.
      streams: residual streams.
      sinkhorn_steps, stream_eps: of the streams' mixing weights.
      routers: of each layer's experts, HASH (by token id) or TOP_K (by score).
      vision_bias: whether TOP_K routers have a bias of their own for image positions.
    """

    num_kv_heads: ClassVar[int] = 1
    position_axes: ClassVar[int] = 1
    deepstack_layers: ClassVar[tuple[int, ...]] = ()

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    sliding_window: int
    layer_kinds: tuple[str, ...]
    sparse_rate: int
    heavy_rate: int
    index_heads: int
    index_dim: int
    index_topk: int
    streams: int
    sinkhorn_steps: int
    stream_eps: float
    routers: tuple[str, ...]
    num_experts: int
    experts_per_token: int
    expert_width: int
    score: str
    routed_scale: float
    swiglu_limit: float
    vision_bias: bool
    rms_norm_eps: float
    window_rope: Rope
    entry_rope: Rope
    max_position_embeddings: int

    def rate(self, kind: str) -> int:
        """Tokens of one entry of a layer of `kind`."""
        return {SPARSE: self.sparse_rate, HEAVY: self.heavy_rate}[kind]


def text_config(t: ConfigSection) -> DeepseekTextConfig:
    """From the decoder's section. Raises CheckpointError for missing or unusable keys and for parts it lacks."""
    _refuse_unknown_parts(t)
    layers, head_dim = t.integer("num_hidden_layers"), t.integer("head_dim")
    heads, groups = t.integer("num_attention_heads"), t.integer("o_groups")
    if t.integer("num_key_value_heads", 1) != 1:
        raise t.error("num_key_value_heads", "must be 1: queries share one key, which is also the value")
    if heads % groups:
        raise t.error("o_groups", f"{groups} must divide num_attention_heads {heads}")
    if t.integer("n_shared_experts", 1) != 1:
        raise t.error("n_shared_experts", "must be 1")
    if not t.flag("norm_topk_prob", True):
        raise t.error("norm_topk_prob", "is false; weights of the chosen experts always sum to 1 here")
    for key, problem in (
        ("attention_bias", "no projection has a bias here"),
        ("mlp_bias", "no projection has a bias here"),
        ("tie_word_embeddings", "the output head is a matrix of its own here"),
    ):
        if t.flag(key, False):
            raise t.error(key, f"is true; {problem}")
    t.choice("hidden_act", ("silu",), "silu")
    rope_dim = _rope_dim(t, head_dim)
    window_rope, entry_rope = _ropes(t)
    rates = _rates(t)
    return DeepseekTextConfig(
        vocab_size=t.integer("vocab_size"),
        hidden_size=t.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_rank=t.integer("q_lora_rank"),
        o_groups=groups,
        o_rank=t.integer("o_lora_rank"),
        sliding_window=t.integer("sliding_window"),
        layer_kinds=_layer_kinds(t, layers),
        sparse_rate=rates[SPARSE],
        heavy_rate=rates[HEAVY],
        index_heads=t.integer("index_n_heads"),
        index_dim=t.integer("index_head_dim"),
        index_topk=t.integer("index_topk"),
        streams=t.integer("hc_mult"),
        sinkhorn_steps=t.integer("hc_sinkhorn_iters"),
        stream_eps=t.number("hc_eps"),
        routers=_routers(t, layers),
        num_experts=t.integer("n_routed_experts"),
        experts_per_token=t.integer("num_experts_per_tok"),
        expert_width=t.integer("moe_intermediate_size"),
        score=t.choice("scoring_func", _SCORES, "sqrtsoftplus"),
        routed_scale=t.number("routed_scaling_factor"),
        swiglu_limit=t.number("swiglu_limit"),
        vision_bias=t.flag("use_vision_bias", False),
        rms_norm_eps=t.number("rms_norm_eps", 1e-20),
        window_rope=window_rope,
        entry_rope=entry_rope,
        max_position_embeddings=t.integer("max_position_embeddings"),
    )


def _refuse_unknown_parts(t: ConfigSection) -> None:
    if t.integer("num_nextn_predict_layers", 0):
        raise t.error("num_nextn_predict_layers", "asks for multi-token prediction, which is not supported")
    for key in t.names():
        if t.value(key) and any(part in key.lower() for part in _UNKNOWN_PARTS):
            raise t.error(key, "asks for a part of the decoder that is not supported")


def _rope_dim(t: ConfigSection, head_dim: int) -> int:
    if "qk_rope_head_dim" in t:
        dim = t.integer("qk_rope_head_dim")
    else:
        dim = int(head_dim * t.number("partial_rotary_factor", 64 / 512))
    if dim % 2 or not 0 < dim <= head_dim:
        raise t.error("qk_rope_head_dim", f"{dim} must be even and at most head_dim {head_dim}")
    return dim


def _rates(t: ConfigSection) -> dict[str, int]:
    given = t.section("compress_rates") if "compress_rates" in t else ConfigSection({})
    rates = {kind: given.integer(kind, default) for kind, default in _RATES.items()}
    for kind, key in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        rates[kind] = t.integer(key, rates[kind])
        if rates[kind] < 1:
            raise t.error("compress_rates", f"{kind} must be 1 or more, got {rates[kind]}")
    return rates


def _layer_kinds(t: ConfigSection, layers: int) -> tuple[str, ...]:
    if "layer_types" in t:
        return _listed(t, "layer_types", layers, {kind: kind for kind in (SLIDING, SPARSE, HEAVY)})
    if "compress_ratios" in t:
        return _listed(t, "compress_ratios", layers, _KIND_OF_RATIO)
    return tuple(SPARSE if i >= 2 and i % 2 else HEAVY for i in range(layers))


def _routers(t: ConfigSection, layers: int) -> tuple[str, ...]:
    if "mlp_layer_types" in t:
        return _listed(t, "mlp_layer_types", layers, {kind: kind for kind in (HASH, TOP_K)})
    hashed = t.integer("num_hash_layers", 3)
    return tuple(HASH if i < hashed else TOP_K for i in range(layers))


def _listed(t: ConfigSection, key: str, layers: int, known: dict[Any, str]) -> tuple[str, ...]:
    """The kinds of the first `layers` entries of a list; more are those of layers that are left out."""
    values = t.value(key)
    if not isinstance(values, list | tuple) or len(values) < layers:
        raise t.error(key, f"must list {layers} layers, got {values!r}")
    for value in values[:layers]:
        if value not in known:
            raise t.error(key, f"knows {', '.join(map(str, known))}; got {value!r}")
    return tuple(known[value] for value in values[:layers])


def _ropes(t: ConfigSection) -> tuple[Rope, Rope]:
    """Rotary frequencies of layers with a window alone, and of those with entries."""
    key = "rope_parameters" if "rope_parameters" in t else "rope_scaling"
    rope = t.section(key) if key in t else ConfigSection({})
    if "main" in rope and "compress" in rope:
        main, entries = rope.section("main"), rope.section("compress")
        return _rope(main, t.number("rope_theta", 10000.0)), _rope(entries, t.number("compress_rope_theta", 160000.0))
    return Rope(t.number("rope_theta", 10000.0)), _rope(rope, t.number("compress_rope_theta", 160000.0), nested=False)


def _rope(rope: ConfigSection, theta: float, *, nested: bool = True) -> Rope:
    theta = rope.number("rope_theta", theta) if nested else theta
    kind = rope.choice("rope_type" if "rope_type" in rope else "type", ("default", "yarn"), "default")
    if kind == "default":
        return Rope(theta)
    if rope.number("attention_factor", 1.0) != 1.0:
        raise rope.error("attention_factor", "must be 1")
    return Rope(
        theta,
        rope.number("factor"),
        rope.integer("original_max_position_embeddings"),
        rope.number("beta_fast", 32.0),
        rope.number("beta_slow", 1.0),
    )
