# SPDX-License-Identifier: Apache-2.0
"""Attention of the DeepSeek-V4 decoder: one shared key that is also the value, a window, entries, and sinks.

A token leaves one state in the pages: its key, and in layers with entries what those are made of and the entries
themselves.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.paged_kv import PagedPrefill
from kernels_pallas.paged_state import Reader, map_decode, map_prefill, rows_reader
from mmjax.layers.linear import linear
from mmjax.models.deepseek_v4_1.entries import closed, picked
from mmjax.models.deepseek_v4_1.norms import unweighted_rms_norm, wide_rms_norm
from mmjax.models.deepseek_v4_1.rope import rope_tables, turn
from mmjax.models.deepseek_v4_1.state import complete_state, join_state, last_tokens, state_columns, store_state
from mmjax.models.deepseek_v4_1.text_config import SLIDING, SPARSE, DeepseekTextConfig


class _Queries(NamedTuple):
    """Of some tokens: heads' queries, and with sparse entries the scorer's queries and its heads' weights."""

    heads: Float[Array, "R N D"]
    index: Float[Array, "R heads d"]
    index_weights: Float[Array, "R heads"]


def attention(
    x: Float[Array, "T E"],
    layer: dict,
    vectors: dict,
    frequencies: Float[Array, "pairs"],
    positions: Int[Array, "T"],
    pages: Any,
    meta: Any,
    *,
    t: DeepseekTextConfig,
    kind: str,
) -> tuple[Float[Array, "T E"], Any]:
    """The branch's output, and the layer's pages with these tokens in them.

    Args:
      frequencies: rotary ones of this kind of layer.
      positions: of the tokens in their sequences.
      pages: [num_blocks, 1, 1, page, width]; () for one whole sequence.
      meta: PagedPrefill or PagedDecode; None for one whole sequence.
    """
    tables = rope_tables(positions, frequencies, x.dtype)
    queries, state = _project(x, layer, vectors, tables, t, kind)
    attend = partial(_attend, sinks=vectors["sinks"], t=t, kind=kind)
    if meta is None:
        state = complete_state(state, layer, frequencies, t, kind)
        out = attend(queries, jnp.int32(0), rows_reader(state), len(x))
    else:
        pages = store_state(state, pages, meta, layer, frequencies, t, kind)
        if isinstance(meta, PagedPrefill):
            out = map_prefill(attend, queries, pages, meta, jax.ShapeDtypeStruct(queries.heads.shape, x.dtype))
        else:
            out = map_decode(attend, queries, pages, meta)
    cos, sin = tables
    grouped = turn(out, cos, -sin).reshape(len(x), t.o_groups, -1)
    o_a = layer["o_a"].reshape(t.o_groups, t.o_rank, -1)
    narrow = jnp.einsum("tgi,goi->tgo", grouped, o_a)
    return linear(narrow.reshape(len(x), -1), layer["o_b"]), pages


def _project(
    x: Float[Array, "T E"], layer: dict, vectors: dict, tables: tuple, t: DeepseekTextConfig, kind: str
) -> tuple[_Queries, Float[Array, "T width"]]:
    """Queries and states of the step's tokens."""
    brought = state_columns(t, kind).brought
    key_end = t.q_rank + t.head_dim
    inner = linear(x, layer["inner"])
    narrow, key, brings, index_weights = jnp.split(
        inner, (t.q_rank, key_end, key_end + brought.stop - brought.start), axis=-1
    )
    narrow = wide_rms_norm(narrow, vectors["q_norm"], t.rms_norm_eps)
    heads, index = jnp.split(linear(narrow, layer["q"]), (t.num_heads * t.head_dim,), axis=-1)
    heads = heads.reshape(len(x), t.num_heads, t.head_dim)
    heads = unweighted_rms_norm(heads, t.rms_norm_eps).astype(x.dtype)
    index = index.reshape(len(x), t.index_heads if kind == SPARSE else 0, t.index_dim)
    if kind == SPARSE:
        index = turn(index, *tables)
    key = turn(wide_rms_norm(key, vectors["kv_norm"], t.rms_norm_eps), *tables)
    return _Queries(turn(heads, *tables), index, index_weights), join_state(key, brings, t, kind)


def _attend(
    queries: tuple,
    first: Int[Array, ""],
    read: Reader,
    longest: int,
    *,
    sinks: Float[Array, "N"],
    t: DeepseekTextConfig,
    kind: str,
) -> Float[Array, "R N D"]:
    """Tokens first, first + 1, ... of one sequence attend to the window behind them and to entries."""
    queries, columns = _Queries(*queries), state_columns(t, kind)
    rows = len(queries.heads)
    position = first + jnp.arange(rows, dtype=jnp.int32)
    token = first - t.sliding_window + 1 + jnp.arange(rows + t.sliding_window - 1, dtype=jnp.int32)
    keys = read(token, columns.key)
    distance = position[:, None] - token
    seen = (token >= 0) & (distance >= 0) & (distance < t.sliding_window)
    if kind != SLIDING and longest >= t.rate(kind):
        number = jnp.arange(longest // t.rate(kind), dtype=jnp.int32)
        made = read(last_tokens(number, t, kind), columns.made)
        entries, index_keys = jnp.split(made, (t.head_dim,), axis=-1)
        visible = closed(position, len(number), t.rate(kind))
        if kind == SPARSE:
            visible = picked(queries.index, queries.index_weights, index_keys, visible, t.index_topk)
        keys, seen = jnp.concatenate([keys, entries]), jnp.concatenate([seen, visible], axis=1)
    return _sink_attention(queries.heads, keys, seen, sinks, t.head_dim**-0.5)


def _sink_attention(
    queries: Float[Array, "R N D"],
    keys: Float[Array, "C D"],
    seen: Bool[Array, "R C"],
    sinks: Float[Array, "N"],
    scale: float,
) -> Float[Array, "R N D"]:
    """softmax over the seen keys and one sink a head, which takes its share and gives nothing; keys are the values."""
    scores = jnp.einsum("rnd,cd->rnc", queries, keys, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, :], scores, -jnp.inf)
    sinks = sinks.astype(jnp.float32)[None, :, None]
    top = jnp.maximum(scores.max(-1, keepdims=True), sinks)
    weights = jnp.exp(scores - top)
    weights = weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))
    return jnp.einsum("rnc,cd->rnd", weights.astype(keys.dtype), keys).astype(queries.dtype)
