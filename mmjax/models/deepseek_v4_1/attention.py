# SPDX-License-Identifier: Apache-2.0
"""Attention of the DeepSeek-V4 decoder: one shared key that is also the value, a window, entries, and sinks.

A token leaves one state in the pages: its key, and in layers with entries what those are made of.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.paged_kv import PagedPrefill
from kernels_pallas.paged_state import Reader, map_decode, map_prefill, rows_reader, write_state
from mmjax.layers.linear import linear
from mmjax.models.deepseek_v4_1.entries import Gated, closed, heavy_entries, picked, sparse_entries
from mmjax.models.deepseek_v4_1.norms import unweighted_rms_norm, wide_rms_norm
from mmjax.models.deepseek_v4_1.rope import rope_tables, turn
from mmjax.models.deepseek_v4_1.text_config import HEAVY, SLIDING, SPARSE, DeepseekTextConfig


class StateWidths(NamedTuple):
    """How the state of a token divides: its key, then values and gates of entries, then those of the scorer's keys."""

    key: int
    entry: int
    index: int

    @property
    def total(self) -> int:
        return self.key + 2 * self.entry + 2 * self.index


def state_widths(t: DeepseekTextConfig, kind: str) -> StateWidths:
    """Of a layer of `kind`; sparse entries overlap, so their tokens bring two halves."""
    entry = {SLIDING: 0, HEAVY: t.head_dim, SPARSE: 2 * t.head_dim}[kind]
    return StateWidths(t.head_dim, entry, 2 * t.index_dim if kind == SPARSE else 0)


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
    attend = partial(_attend, layer=layer, vectors=vectors, frequencies=frequencies, t=t, kind=kind)
    if meta is None:
        out = attend(queries, jnp.int32(0), rows_reader(state), len(x))
    else:
        pages = write_state(pages, state, meta.slots)
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
    widths = state_widths(t, kind)
    inner = linear(x, layer["inner"])
    narrow, key, rest, index_weights = jnp.split(
        inner, (t.q_rank, t.q_rank + widths.key, t.q_rank + widths.total), axis=-1
    )
    narrow = wide_rms_norm(narrow, vectors["q_norm"], t.rms_norm_eps)
    heads, index = jnp.split(linear(narrow, layer["q"]), (t.num_heads * t.head_dim,), axis=-1)
    heads = heads.reshape(len(x), t.num_heads, t.head_dim)
    heads = unweighted_rms_norm(heads, t.rms_norm_eps).astype(x.dtype)
    index = index.reshape(len(x), t.index_heads if kind == SPARSE else 0, t.index_dim)
    if kind == SPARSE:
        index = turn(index, *tables)
    key = turn(wide_rms_norm(key, vectors["kv_norm"], t.rms_norm_eps), *tables)
    return _Queries(turn(heads, *tables), index, index_weights), jnp.concatenate([key, rest], axis=-1)


def _attend(
    queries: tuple,
    first: Int[Array, ""],
    read: Reader,
    longest: int,
    *,
    layer: dict,
    vectors: dict,
    frequencies: Float[Array, "pairs"],
    t: DeepseekTextConfig,
    kind: str,
) -> Float[Array, "R N D"]:
    """Tokens first, first + 1, ... of one sequence attend to the window behind them and to entries."""
    queries = _Queries(*queries)
    rows = len(queries.heads)
    position = first + jnp.arange(rows, dtype=jnp.int32)
    column = first - t.sliding_window + 1 + jnp.arange(rows + t.sliding_window - 1, dtype=jnp.int32)
    keys = read(column)[:, : t.head_dim]
    distance = position[:, None] - column
    seen = (column >= 0) & (distance >= 0) & (distance < t.sliding_window)
    if kind != SLIDING and longest >= t.rate(kind):
        entries, visible = _entries(queries, position, read, longest, layer, frequencies, t, kind)
        keys, seen = jnp.concatenate([keys, entries]), jnp.concatenate([seen, visible], axis=1)
    return _sink_attention(queries.heads, keys, seen, vectors["sinks"], t.head_dim**-0.5)


def _entries(
    queries: _Queries,
    position: Int[Array, "R"],
    read: Reader,
    longest: int,
    layer: dict,
    frequencies: Float[Array, "pairs"],
    t: DeepseekTextConfig,
    kind: str,
) -> tuple[Float[Array, "C D"], Bool[Array, "R C"]]:
    """The sequence's entries and who sees which; incomplete ones hold anything finite, and nobody sees them."""
    rate, widths = t.rate(kind), state_widths(t, kind)
    count = longest // rate
    state = read(jnp.arange(count * rate, dtype=jnp.int32).reshape(count, rate))[..., widths.key :]
    values, gates, index_values, index_gates = jnp.split(
        state, (widths.entry, 2 * widths.entry, 2 * widths.entry + widths.index), axis=-1
    )
    tables = rope_tables(jnp.arange(count, dtype=jnp.int32) * rate, frequencies, state.dtype)
    allowed = closed(position, count, rate)
    gated = Gated(values, gates)
    if kind == HEAVY:
        return heavy_entries(gated, layer["entry_bias"], layer["entry_norm"], *tables, t.rms_norm_eps), allowed
    entries = sparse_entries(gated, layer["entry_bias"], layer["entry_norm"], *tables, t.rms_norm_eps)
    index_keys = sparse_entries(
        Gated(index_values, index_gates), layer["index_bias"], layer["index_norm"], *tables, t.rms_norm_eps
    )
    return entries, picked(queries.index, queries.index_weights, index_keys, allowed, t.index_topk)


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
