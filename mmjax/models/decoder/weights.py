# SPDX-License-Identifier: Apache-2.0
"""Weight table of the shared decoder, in the names that checkpoints in transformers' layout carry."""

from __future__ import annotations

from mmjax.models.decoder.config import DecoderConfig, MoeConfig
from mmjax.models.family import Weight


def text_weights(t: DecoderConfig, *, model: str = "model", head: str = "lm_head") -> tuple[Weight, ...]:
    """Every leaf of `text`: q, k and v joined, gate and up joined, vectors stacked over layers.

    Args:
      model: what the names of embeddings, layers and the final norm start with.
      head: name of the output head.
    """
    width = t.hidden_size
    table = [
        Weight("text.embed", (f"{model}.embed_tokens.weight",), ((t.vocab_size, width),)),
        Weight("text.norm", (f"{model}.norm.weight",), ((width,),)),
    ]
    if not t.tie_word_embeddings:
        table.append(Weight("text.lm_head", (f"{head}.weight",), ((t.vocab_size, width),)))
    for i in range(t.num_layers):
        ours, theirs = f"text.layers.{i}", f"{model}.layers.{i}"
        sparse = t.moe is not None and i in t.moe.sparse_layers
        table += _attention(t, ours, f"{theirs}.self_attn")
        table += _sparse(t.moe, width, ours, f"{theirs}.mlp") if sparse else _dense(t, ours, f"{theirs}.mlp")
    return (*table, *_vectors(t, f"{model}.layers.{{i}}"))


def _attention(t: DecoderConfig, ours: str, theirs: str) -> tuple[Weight, ...]:
    width, q, kv = t.hidden_size, t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
    projections = tuple(f"{theirs}.{x}_proj.weight" for x in "qkv")
    return (
        Weight(f"{ours}.qkv", projections, ((q, width), (kv, width), (kv, width))),
        Weight(f"{ours}.o", (f"{theirs}.o_proj.weight",), ((width, q),)),
    )


def _dense(t: DecoderConfig, ours: str, theirs: str) -> tuple[Weight, ...]:
    width, mlp, padded = t.hidden_size, t.intermediate_size, t.mlp_width
    gate_up = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
    return (
        Weight(f"{ours}.gate_up", gate_up, ((mlp, width), (mlp, width)), pad_to=((0, padded),)),
        Weight(f"{ours}.down", (f"{theirs}.down_proj.weight",), ((width, mlp),), pad_to=((1, padded),)),
    )


def _sparse(moe: MoeConfig, width: int, ours: str, theirs: str) -> tuple[Weight, ...]:
    """Experts in the layout of checkpoints that fuse them: inputs before outputs, gate and up joined."""
    experts, mlp = moe.num_experts, moe.intermediate_size
    return (
        Weight(f"{ours}.router", (f"{theirs}.gate.weight",), ((experts, width),)),
        Weight(f"{ours}.experts_gate_up", (f"{theirs}.experts.gate_up_proj",), ((experts, width, 2 * mlp),)),
        Weight(f"{ours}.experts_down", (f"{theirs}.experts.down_proj",), ((experts, mlp, width),)),
    )


def _vectors(t: DecoderConfig, layer: str) -> tuple[Weight, ...]:
    """Args: layer: the template of a layer's name."""
    width, q, kv = t.hidden_size, t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
    norms = {"input_norm": ("input_layernorm", width), "post_norm": ("post_attention_layernorm", width)}
    if t.qk_norm:
        norms |= {"q_norm": ("self_attn.q_norm", t.head_dim), "k_norm": ("self_attn.k_norm", t.head_dim)}
    if t.post_norms:
        norms |= {"attention_out_norm": ("post_norm1", width), "mlp_out_norm": ("post_norm2", width)}
    table = [
        Weight(f"text.vectors.{ours}", (f"{layer}.{theirs}.weight",), ((length,),), stack=t.num_layers)
        for ours, (theirs, length) in norms.items()
    ]
    if t.qkv_bias:
        biases = tuple(f"{layer}.self_attn.{x}_proj.bias" for x in "qkv")
        table.append(Weight("text.vectors.qkv_bias", biases, ((q,), (kv,), (kv,)), stack=t.num_layers))
    return tuple(table)
