# SPDX-License-Identifier: Apache-2.0
"""The DeepSeek-V4 decoder: several residual streams, attention with windows and entries, a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.layers.fusion import StepTokens
from mmjax.layers.linear import linear
from mmjax.models.deepseek_v4_1.attention import attention
from mmjax.models.deepseek_v4_1.config import DeepseekV41Config
from mmjax.models.deepseek_v4_1.experts import mixture
from mmjax.models.deepseek_v4_1.frequencies import rope_frequencies
from mmjax.models.deepseek_v4_1.norms import wide_rms_norm
from mmjax.models.deepseek_v4_1.state import state_columns, state_width
from mmjax.models.deepseek_v4_1.streams import join_streams, read_streams, write_streams
from mmjax.models.deepseek_v4_1.text_config import HASH, SLIDING, SPARSE, DeepseekTextConfig

FLOAT32 = jnp.dtype(jnp.float32)


def text_spec(cfg: DeepseekV41Config) -> dict:
    """Shapes of the decoder's parameters. What the published model keeps in float32 is float32 in every model."""
    t, dtype = cfg.text, jnp.dtype(cfg.dtype)

    def leaf(*shape: int, dtype: jnp.dtype = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    wide = partial(leaf, dtype=FLOAT32)
    width, layers, mixes = t.hidden_size, t.num_layers, (2 + t.streams) * t.streams
    return {
        "embed": leaf(t.vocab_size, width),
        "layers": [
            _attention_spec(t, kind, leaf, wide) | _experts_spec(t, router, leaf, wide) | _streams_spec(t, wide)
            for kind, router in zip(t.layer_kinds, t.routers, strict=True)
        ],
        "vectors": {
            "input_norm": wide(layers, width),
            "post_norm": wide(layers, width),
            "q_norm": wide(layers, t.q_rank),
            "kv_norm": wide(layers, t.head_dim),
            "sinks": wide(layers, t.num_heads),
            **{f"{branch}_base": wide(layers, mixes) for branch in ("attention", "mixture")},
            **{f"{branch}_scale": wide(layers, 3) for branch in ("attention", "mixture")},
        },
        "join": {"matrix": wide(t.streams, t.streams * width), "base": wide(t.streams), "scale": wide(1)},
        "norm": wide(width),
        "lm_head": leaf(t.vocab_size, width),
    }


def _attention_spec(t: DeepseekTextConfig, kind: str, leaf: Any, wide: Any) -> dict:
    width, columns = t.hidden_size, state_columns(t, kind)
    heads = t.index_heads if kind == SPARSE else 0
    brought = columns.brought.stop - columns.brought.start
    spec = {
        "inner": leaf(t.q_rank + t.head_dim + brought + heads, width),
        "q": leaf(t.num_heads * t.head_dim + heads * t.index_dim, t.q_rank),
        "o_a": leaf(t.o_groups * t.o_rank, t.num_heads * t.head_dim // t.o_groups),
        "o_b": leaf(width, t.o_groups * t.o_rank),
    }
    if kind != SLIDING:
        halves = 2 if kind == SPARSE else 1
        spec |= {"entry_bias": wide(t.rate(kind), halves * t.head_dim), "entry_norm": wide(t.head_dim)}
    if kind == SPARSE:
        spec |= {"index_bias": wide(t.rate(kind), 2 * t.index_dim), "index_norm": wide(t.index_dim)}
    return spec


def _experts_spec(t: DeepseekTextConfig, router: str, leaf: Any, wide: Any) -> dict:
    width, mlp, count = t.hidden_size, t.expert_width, t.num_experts
    spec = {
        "router": leaf(count, width),
        "experts_gate_up": leaf(count, width, 2 * mlp),
        "experts_down": leaf(count, mlp, width),
        "shared_gate_up": leaf(2 * mlp, width),
        "shared_down": leaf(width, mlp),
    }
    if router == HASH:
        return spec | {"expert_of_id": leaf(t.vocab_size, t.experts_per_token, dtype=jnp.dtype(jnp.int32))}
    return spec | {"router_bias": wide(count)} | ({"vision_bias": wide(count)} if t.vision_bias else {})


def _streams_spec(t: DeepseekTextConfig, wide: Any) -> dict:
    shape = ((2 + t.streams) * t.streams, t.streams * t.hidden_size)
    return {"attention_mix": wide(*shape), "mixture_mix": wide(*shape)}


def state_shapes(cfg: DeepseekV41Config) -> tuple[tuple[int, int, int], ...]:
    """What a token leaves in the pages of each layer: one part, one head, and the state's width."""
    return tuple((1, 1, state_width(cfg.text, kind)) for kind in cfg.text.layer_kinds)


def layer_outputs(
    params: dict,
    cfg: DeepseekV41Config,
    hidden: Float[Array, "T E"],
    positions: Int[Array, "1 T"],
    kv: tuple,
    meta: Any,
    attend: Any,
    deepstack: None = None,
    tokens: StepTokens | None = None,
) -> tuple[list[Float[Array, "T streams E"]], tuple]:
    """The input and the output of every layer (L + 1 arrays of all streams), and the layers' new pages.

    Args:
      kv: the pages of each layer, see `state_shapes`; () without pages.
      meta: PagedPrefill, PagedDecode, or None for one whole sequence.
      attend: not used; the layers' attention is their own.
      deepstack: not used; the tower gives no such levels.
      tokens: what stands at each position: experts are chosen by it.
    """
    t = cfg.text
    ids = jnp.where(tokens.is_row, cfg.image_token_id, tokens.ids)
    tokens = StepTokens(ids, tokens.is_row)
    streams = jnp.repeat(hidden[:, None, :], t.streams, axis=1)
    outputs, new_kv = [streams], []
    for i, layer in enumerate(params["layers"]):
        vectors = {name: stacked[i] for name, stacked in params["vectors"].items()}
        kind, router = t.layer_kinds[i], t.routers[i]
        step = (streams, positions[0], kv[i], meta, tokens)
        streams, pages = _layer(layer, vectors, *step, cfg=t, kind=kind, router=router)
        outputs.append(streams)
        new_kv.append(pages)
    return outputs, tuple(new_kv)


def forward(
    params: dict,
    cfg: DeepseekV41Config,
    hidden: Float[Array, "T E"],
    positions: Int[Array, "1 T"],
    kv: tuple,
    meta: Any,
    attend: Any,
    deepstack: None = None,
    tokens: StepTokens | None = None,
) -> tuple[Float[Array, "T E"], tuple]:
    """The whole decoder with its final norm; arguments as in `layer_outputs`."""
    outputs, kv = layer_outputs(params, cfg, hidden, positions, kv, meta, attend, deepstack, tokens)
    joined = join_streams(outputs[-1], params["join"], cfg.text)
    return wide_rms_norm(joined, params["norm"], cfg.text.rms_norm_eps), kv


def logits(params: dict, cfg: DeepseekV41Config, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
    """float32 logits of normed hidden states."""
    return linear(hidden, params["lm_head"], out_dtype=jnp.float32)


# A jitted function inside the jitted step is traced and lowered once a kind of layer, however many layers call it.
@partial(jax.jit, static_argnames=("cfg", "kind", "router"))
def _layer(
    layer: dict,
    vectors: dict,
    streams: Float[Array, "T streams E"],
    positions: Int[Array, "T"],
    pages: Any,
    meta: Any,
    tokens: StepTokens,
    *,
    cfg: DeepseekTextConfig,
    kind: str,
    router: str,
) -> tuple[Float[Array, "T streams E"], Any]:
    rope = cfg.window_rope if kind == SLIDING else cfg.entry_rope
    frequencies = jnp.asarray(rope_frequencies(cfg.rope_dim, rope))
    weights = [vectors[f"attention_{part}"] for part in ("base", "scale")]
    x, mix = read_streams(streams, layer["attention_mix"], *weights, cfg)
    normed = wide_rms_norm(x, vectors["input_norm"], cfg.rms_norm_eps)
    out, pages = attention(normed, layer, vectors, frequencies, positions, pages, meta, t=cfg, kind=kind)
    streams = write_streams(streams, out, mix)
    weights = [vectors[f"mixture_{part}"] for part in ("base", "scale")]
    x, mix = read_streams(streams, layer["mixture_mix"], *weights, cfg)
    normed = wide_rms_norm(x, vectors["post_norm"], cfg.rms_norm_eps)
    return write_streams(streams, mixture(normed, layer, router, tokens, cfg), mix), pages
