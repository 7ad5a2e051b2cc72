# SPDX-License-Identifier: Apache-2.0
"""What a token of the DeepSeek-V4 decoder leaves in a layer's pages, and how the entries among it are made."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_state import closing_windows, read_windows, rows_reader, write_columns, write_state
from mmjax.models.deepseek_v4_1.entries import Gated, heavy_entries, sparse_entries
from mmjax.models.deepseek_v4_1.rope import rope_tables
from mmjax.models.deepseek_v4_1.text_config import HEAVY, SLIDING, SPARSE, DeepseekTextConfig


class StateColumns(NamedTuple):
    """Columns of a state.

    Attributes:
      key: the token's key.
      entry, index_key: an entry and the scorer's key of it, in the state of the entry's last token.
      values, gates: what the token brings to entries, and what weighs it.
      index_values, index_gates: the same for the scorer's keys.
    """

    key: slice
    entry: slice
    index_key: slice
    values: slice
    gates: slice
    index_values: slice
    index_gates: slice

    @property
    def made(self) -> slice:
        """Entry and scorer's key."""
        return slice(self.entry.start, self.index_key.stop)

    @property
    def brought(self) -> slice:
        """All that entries are made of."""
        return slice(self.values.start, self.index_gates.stop)


def state_columns(t: DeepseekTextConfig, kind: str) -> StateColumns:
    """Of a layer of `kind`; sparse entries overlap, so their tokens bring two halves."""
    entry = 0 if kind == SLIDING else t.head_dim
    index = t.index_dim if kind == SPARSE else 0
    halves = 2 if kind == SPARSE else 1
    columns, start = [], 0
    for width in (t.head_dim, entry, index, halves * entry, halves * entry, 2 * index, 2 * index):
        columns.append(slice(start, start + width))
        start += width
    return StateColumns(*columns)


def state_width(t: DeepseekTextConfig, kind: str) -> int:
    """Values of a state."""
    return state_columns(t, kind).index_gates.stop


def join_state(
    key: Float[Array, "T D"], brought: Float[Array, "T width"], t: DeepseekTextConfig, kind: str
) -> Float[Array, "T state"]:
    """States of new tokens; their entries are made later."""
    made = state_columns(t, kind).made
    return jnp.concatenate([key, jnp.zeros((len(key), made.stop - made.start), key.dtype), brought], axis=-1)


def store_state(
    state: Float[Array, "T width"],
    pages: Any,
    meta: Any,
    layer: dict,
    frequencies: Array,
    t: DeepseekTextConfig,
    kind: str,
) -> Any:
    """The pages with the step's states in them, and with the entries that these complete."""
    pages = write_state(pages, state, meta.slots)
    if kind == SLIDING:
        return pages
    columns = state_columns(t, kind)
    windows = closing_windows(pages, meta, len(state), t.rate(kind))
    brought = read_windows(pages, windows, tokens_of_entries(windows.number, t, kind), columns.brought)
    made = make_entries(brought, windows.number, layer, frequencies, t, kind)
    return write_columns(pages, made, windows.slots, columns.made)


def complete_state(
    state: Float[Array, "T width"], layer: dict, frequencies: Array, t: DeepseekTextConfig, kind: str
) -> Float[Array, "T width"]:
    """States of one whole sequence with all entries that it completes."""
    if kind == SLIDING or len(state) < t.rate(kind):
        return state
    columns, rate = state_columns(t, kind), t.rate(kind)
    number = jnp.arange(len(state) // rate, dtype=jnp.int32)
    brought = rows_reader(state)(tokens_of_entries(number, t, kind), columns.brought)
    made = make_entries(brought, number, layer, frequencies, t, kind)
    return state.at[last_tokens(number, t, kind), columns.made].set(made)


def tokens_of_entries(number: Int[Array, "C"], t: DeepseekTextConfig, kind: str) -> Int[Array, "C tokens"]:
    """Numbers of the tokens of numbered entries; sparse ones begin one entry's tokens earlier."""
    rate = t.rate(kind)
    first = -rate if kind == SPARSE else 0
    return number[:, None] * rate + jnp.arange(first, rate, dtype=jnp.int32)


def last_tokens(number: Int[Array, "C"], t: DeepseekTextConfig, kind: str) -> Int[Array, "C"]:
    """Number of the token that completes each entry and keeps it."""
    return number * t.rate(kind) + t.rate(kind) - 1


def make_entries(
    brought: Float[Array, "C tokens width"],
    number: Int[Array, "C"],
    layer: dict,
    frequencies: Float[Array, "pairs"],
    t: DeepseekTextConfig,
    kind: str,
) -> Float[Array, "C made"]:
    """Entries, and behind them the scorer's keys, from what their tokens brought."""
    columns = state_columns(t, kind)
    widths = [column.stop - column.start for column in columns[3:]]
    splits = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    values, gates, index_values, index_gates = jnp.split(brought, splits, axis=-1)
    tables = rope_tables(number * t.rate(kind), frequencies, brought.dtype)
    gated = Gated(values, gates)
    if kind == HEAVY:
        return heavy_entries(gated, layer["entry_bias"], layer["entry_norm"], *tables, t.rms_norm_eps)
    parts = [
        sparse_entries(tokens, number == 0, layer[f"{name}_bias"], layer[f"{name}_norm"], *tables, t.rms_norm_eps)
        for tokens, name in ((gated, "entry"), (Gated(index_values, index_gates), "index"))
    ]
    return jnp.concatenate(parts, axis=-1)
