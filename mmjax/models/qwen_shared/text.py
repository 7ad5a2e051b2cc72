# SPDX-License-Identifier: Apache-2.0
"""The Qwen2 decoder: RMSNorm, grouped attention with biases and multi-axis rotary positions, SwiGLU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.layers.fusion import StepTokens
from mmjax.layers.linear import gated_mlp, linear
from mmjax.layers.norm import rms_norm
from mmjax.layers.rope import apply_rotary, rotary_tables
from mmjax.models.qwen_shared.config import QwenConfig, QwenTextConfig
from mmjax.models.rotary import text_pairs


def text_spec(cfg: QwenConfig) -> dict:
    """Shapes of the decoder's parameters; `lm_head` is absent when it is tied to `embed`."""
    t, dtype = cfg.text, jnp.dtype(cfg.dtype)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    width, layers = t.hidden_size, t.num_layers
    layer = {
        "qkv": leaf(t.qkv_width, width),
        "o": leaf(width, t.num_heads * t.head_dim),
        "gate_up": leaf(2 * t.mlp_width, width),
        "down": leaf(width, t.mlp_width),
    }
    spec = {
        "embed": leaf(t.vocab_size, width),
        "layers": [dict(layer) for _ in range(layers)],
        "vectors": {
            "qkv_bias": leaf(layers, t.qkv_width),
            "input_norm": leaf(layers, width),
            "post_norm": leaf(layers, width),
        },
        "norm": leaf(width),
    }
    return spec if t.tie_word_embeddings else spec | {"lm_head": leaf(t.vocab_size, width)}


def embed(params: dict, cfg: QwenConfig, ids: Int[Array, "T"]) -> Float[Array, "T E"]:
    """Token embeddings; ids lie in the vocabulary."""
    return jnp.take(params["embed"], ids, axis=0, mode="clip")


def layer_outputs(
    params: dict,
    cfg: QwenConfig,
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
    pairs = text_pairs(t.head_dim, t.rope_theta, t.mrope_section)
    cos, sin = (table.astype(hidden.dtype) for table in rotary_tables(positions, *pairs))
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
    cfg: QwenConfig,
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


def logits(params: dict, cfg: QwenConfig, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
    """float32 logits of normed hidden states."""
    head = params["embed"] if cfg.text.tie_word_embeddings else params["lm_head"]
    return linear(hidden, head, out_dtype=jnp.float32)


# A jitted function inside the jitted step is traced and lowered once, however many layers call it.
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
    cfg: QwenTextConfig,
    attend: Any,
) -> tuple[Float[Array, "T E"], Any]:
    tokens, heads, kv_heads, dim = len(hidden), cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    normed = rms_norm(hidden, vectors["input_norm"], cfg.rms_norm_eps)
    qkv = linear(normed, layer["qkv"], vectors["qkv_bias"]).reshape(tokens, heads + 2 * kv_heads, dim)
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
    out, kv = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, kv, meta, dim**-0.5)
    hidden = hidden + linear(out.reshape(tokens, heads * dim), layer["o"])
    normed = rms_norm(hidden, vectors["post_norm"], cfg.rms_norm_eps)
    return hidden + gated_mlp(normed, layer["gate_up"], layer["down"]), kv
