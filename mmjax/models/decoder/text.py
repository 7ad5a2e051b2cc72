# SPDX-License-Identifier: Apache-2.0
"""The decoder: RMSNorm, grouped attention with rotary positions on one or several axes, SwiGLU or experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.layers.fusion import StepTokens
from mmjax.layers.linear import gated_mlp, linear
from mmjax.layers.moe import moe_mlp
from mmjax.layers.norm import rms_norm
from mmjax.layers.rope import apply_rotary, rotary_tables
from mmjax.models.decoder.config import DecoderConfig
from mmjax.models.rotary import text_pairs
from mmjax.models.vlm import VLMConfig


def text_spec(cfg: VLMConfig) -> dict:
    """Shapes of the decoder's parameters; `lm_head` is absent when it is tied to `embed`."""
    t, dtype = cfg.text, jnp.dtype(cfg.dtype)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    width, layers = t.hidden_size, t.num_layers
    attention = {"qkv": leaf(t.qkv_width, width), "o": leaf(width, t.num_heads * t.head_dim)}
    dense = {"gate_up": leaf(2 * t.mlp_width, width), "down": leaf(width, t.mlp_width)}
    sparse, sparse_layers = {}, ()
    if t.moe is not None:
        experts, expert_width, sparse_layers = t.moe.num_experts, t.moe.intermediate_size, t.moe.sparse_layers
        sparse = {
            "router": leaf(experts, width),
            "experts_gate_up": leaf(experts, width, 2 * expert_width),
            "experts_down": leaf(experts, expert_width, width),
        }
    spec = {
        "embed": leaf(t.vocab_size, width),
        "layers": [attention | (sparse if i in sparse_layers else dense) for i in range(layers)],
        "vectors": {name: leaf(layers, length) for name, length in vector_lengths(t).items()},
        "norm": leaf(width),
    }
    return spec if t.tie_word_embeddings else spec | {"lm_head": leaf(t.vocab_size, width)}


def vector_lengths(t: DecoderConfig) -> dict[str, int]:
    """The vectors of every layer, which are stacked over layers, and their lengths."""
    lengths = {"input_norm": t.hidden_size, "post_norm": t.hidden_size}
    if t.qkv_bias:
        lengths["qkv_bias"] = t.qkv_width
    if t.qk_norm:
        lengths |= {"q_norm": t.head_dim, "k_norm": t.head_dim}
    if t.post_norms:
        lengths |= {"attention_out_norm": t.hidden_size, "mlp_out_norm": t.hidden_size}
    return lengths


def embed(params: dict, cfg: VLMConfig, ids: Int[Array, "T"]) -> Float[Array, "T E"]:
    """Token embeddings; ids lie in the vocabulary."""
    return jnp.take(params["embed"], ids, axis=0, mode="clip")


def layer_outputs(
    params: dict,
    cfg: VLMConfig,
    hidden: Float[Array, "T E"],
    positions: Int[Array, "A T"],
    kv: tuple,
    meta: Any,
    attend: Any,
    deepstack: Float[Array, "levels T E"] | None = None,
    tokens: StepTokens | None = None,
) -> tuple[list[Float[Array, "T E"]], tuple]:
    """The input and the output of every layer (L + 1 arrays, before the final norm), and the layers' new KV.

    Args:
      positions: one row a rotary axis.
      kv: what `attend` keeps of each layer.
      meta: what `attend` knows about this step.
      attend: static; (q, k, v, kv of the layer, meta, scale) -> (out [T, N, D], kv of the layer).
      deepstack: rows added to the hidden states after `cfg.text.deepstack_layers`, zero at text tokens.
      tokens: what each position holds; this decoder treats all alike.
    """
    t = cfg.text
    # The model rounds its rotary tables to its own dtype before use.
    pairs = text_pairs(t.head_dim, t.rope_theta, t.mrope_section, interleaved=t.mrope_interleaved)
    cos, sin = (table.astype(hidden.dtype) for table in rotary_tables(positions, *pairs))
    hidden = _scaled(hidden, t.embedding_multiplier)
    outputs, new_kv = [hidden], []
    for i, layer in enumerate(params["layers"]):
        vectors = {name: stacked[i] for name, stacked in params["vectors"].items()}
        hidden, layer_kv = _layer(layer, vectors, hidden, cos, sin, kv[i], meta, cfg=t, attend=attend)
        if deepstack is not None and i in t.deepstack_layers:
            hidden = hidden + deepstack[t.deepstack_layers.index(i)].astype(hidden.dtype)
        outputs.append(hidden)
        new_kv.append(layer_kv)
    return outputs, tuple(new_kv)


def forward(
    params: dict,
    cfg: VLMConfig,
    hidden: Float[Array, "T E"],
    positions: Int[Array, "A T"],
    kv: tuple,
    meta: Any,
    attend: Any,
    deepstack: Float[Array, "levels T E"] | None = None,
    tokens: StepTokens | None = None,
) -> tuple[Float[Array, "T E"], tuple]:
    """The whole decoder with its final norm; arguments as in `layer_outputs`."""
    outputs, kv = layer_outputs(params, cfg, hidden, positions, kv, meta, attend, deepstack, tokens)
    return rms_norm(outputs[-1], params["norm"], cfg.text.rms_norm_eps), kv


def logits(params: dict, cfg: VLMConfig, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
    """float32 logits of normed hidden states."""
    head = params["embed"] if cfg.text.tie_word_embeddings else params["lm_head"]
    return _scaled(linear(hidden, head, out_dtype=jnp.float32), cfg.text.logits_scaling)


# A jitted function inside the jitted step is traced and lowered once a kind of layer, however many layers call it.
@partial(jax.jit, static_argnames=("cfg", "attend"))
def _layer(
    layer: dict,
    vectors: dict,
    hidden: Float[Array, "T E"],
    cos: Float[Array, "T half_D"],
    sin: Float[Array, "T half_D"],
    kv: Any,
    meta: Any,
    *,
    cfg: DecoderConfig,
    attend: Any,
) -> tuple[Float[Array, "T E"], Any]:
    tokens, heads, kv_heads, dim = len(hidden), cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    normed = rms_norm(hidden, vectors["input_norm"], cfg.rms_norm_eps)
    qkv = linear(normed, layer["qkv"], vectors.get("qkv_bias")).reshape(tokens, heads + 2 * kv_heads, dim)
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
    if cfg.qk_norm:
        q = rms_norm(q, vectors["q_norm"], cfg.rms_norm_eps)
        k = rms_norm(k, vectors["k_norm"], cfg.rms_norm_eps)
    scale = dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    out, kv = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, kv, meta, scale)
    hidden = _add(hidden, linear(out.reshape(tokens, heads * dim), layer["o"]), vectors.get("attention_out_norm"), cfg)
    normed = rms_norm(hidden, vectors["post_norm"], cfg.rms_norm_eps)
    return _add(hidden, _mlp(normed, layer, cfg), vectors.get("mlp_out_norm"), cfg), kv


def _mlp(x: Float[Array, "T E"], layer: dict, cfg: DecoderConfig) -> Float[Array, "T E"]:
    """The dense MLP, or the experts where the layer has some."""
    if "router" in layer:
        return moe_mlp(x, layer, cfg.moe)
    return gated_mlp(x, layer["gate_up"], layer["down"])


def _add(
    hidden: Float[Array, "T E"], branch: Float[Array, "T E"], out_norm: Float[Array, "E"] | None, cfg: DecoderConfig
) -> Float[Array, "T E"]:
    """The hidden states plus what a branch made of them."""
    if out_norm is not None:
        branch = rms_norm(branch, out_norm, cfg.rms_norm_eps)
    return hidden + _scaled(branch, cfg.residual_multiplier)


def _scaled(x: Float[Array, "*dims"], factor: float) -> Float[Array, "*dims"]:
    """x * factor, rounded once: the factor itself is not rounded to x's dtype."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)
