# SPDX-License-Identifier: Apache-2.0
"""Pages of per-token state of any width, for attention that keeps more than a key and a value, and its steps' shape.

One array a layer, [num_blocks, 1, 1, page, width], so that it lies as pages of keys and values do. A state may hold, at
the last token of each window of a fixed number of tokens, what follows from the whole window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_kv import PagedDecode, PagedPrefill, write_rows

# Queries of one tile of a prefill step, and sequences that advance together in a decode step.
TILE_ROWS = 128
DECODE_BATCH = 8

# Reads the state of one sequence: token numbers of any shape and the wanted columns -> [*shape, columns], zeros outside
# 0 .. length - 1.
Reader = Callable[[Int[Array, "*shape"], slice], Float[Array, "*shape columns"]]


class Windows(NamedTuple):
    """Windows whose last token a step brings; those behind the last real one are padding.

    Attributes:
      number: of each window in its sequence.
      tables: pages of its sequence.
      slots: where its last token lies; past the pool for padding.
    """

    number: Int[Array, " W"]
    tables: Int[Array, "W M"]
    slots: Int[Array, " W"]


def write_state(
    pages: Float[Array, "num_blocks 1 1 page width"], state: Float[Array, "T width"], slots: Int[Array, " T"]
) -> Float[Array, "num_blocks 1 1 page width"]:
    """The pages after token t's state was written to slots[t]; slots past the pool are dropped."""
    return write_rows(pages, state[:, None, None, :], slots)


def state_reader(
    pages: Float[Array, "num_blocks 1 1 page width"], table: Int[Array, " M"], length: Int[Array, ""]
) -> Reader:
    """A reader of the sequence with pages `table`, of which `length` tokens are written."""
    page = pages.shape[3]

    def read(tokens: Int[Array, "*shape"], columns: slice) -> Float[Array, "*shape columns"]:
        blocks = table.at[tokens // page].get(mode="clip")
        state = pages.at[blocks, 0, 0, tokens % page, columns].get(mode="clip")
        return jnp.where(((tokens >= 0) & (tokens < length))[..., None], state, 0)

    return read


def rows_reader(state: Float[Array, "T width"]) -> Reader:
    """A reader of a sequence whose state lies in one array, token by token."""

    def read(tokens: Int[Array, "*shape"], columns: slice) -> Float[Array, "*shape columns"]:
        rows = state.at[tokens, columns].get(mode="clip")
        return jnp.where(((tokens >= 0) & (tokens < len(state)))[..., None], rows, 0)

    return read


def closing_windows(
    pages: Float[Array, "num_blocks 1 1 page width"], meta: PagedPrefill | PagedDecode, tokens: int, size: int
) -> Windows:
    """The windows of `size` tokens that end in a step of `tokens` tokens."""
    if isinstance(meta, PagedPrefill):
        before, after = meta.prefix_lens // size, (meta.prefix_lens + jnp.diff(meta.cu_seqlens)) // size
        ends = jnp.cumsum(after - before, dtype=jnp.int32)
        index = jnp.arange(tokens // size + len(before), dtype=jnp.int32)
        sequence = jnp.minimum((ends <= index[:, None]).sum(1, dtype=jnp.int32), len(before) - 1)
        number = after[sequence] - ends[sequence] + index
        real = index < ends[-1]
    else:
        sequence = jnp.arange(tokens, dtype=jnp.int32)
        number = meta.seq_lens // size - 1
        real = (meta.seq_lens > 0) & (meta.seq_lens % size == 0)
    tables, page, last = meta.block_tables[sequence], pages.shape[3], number * size + size - 1
    block = jnp.take_along_axis(tables, last[:, None] // page, axis=1, mode="clip")[:, 0]
    return Windows(number, tables, jnp.where(real, block * page + last % page, pages.shape[0] * page))


def read_windows(
    pages: Float[Array, "num_blocks 1 1 page width"], windows: Windows, tokens: Int[Array, "W n"], columns: slice
) -> Float[Array, "W n columns"]:
    """State of numbered tokens of the windows' sequences, which are written; zeros before the first."""
    page = pages.shape[3]
    blocks = jnp.take_along_axis(windows.tables, tokens // page, axis=1, mode="clip")
    state = pages.at[blocks, 0, 0, tokens % page, columns].get(mode="clip")
    return jnp.where((tokens >= 0)[..., None], state, 0)


def write_columns(
    pages: Float[Array, "num_blocks 1 1 page width"],
    values: Float[Array, "W columns"],
    slots: Int[Array, " W"],
    columns: slice,
) -> Float[Array, "num_blocks 1 1 page width"]:
    """The pages after some columns of the states at `slots` were written; slots past the pool are dropped."""
    page, pool = pages.shape[3], pages.shape[0] * pages.shape[3]
    # As in `write_rows`: dropped slots are distinct too.
    slots = jnp.where(slots < pool, slots, pool + jnp.arange(slots.shape[0], dtype=slots.dtype))
    at = pages.at[slots // page, 0, 0, slots % page, columns]
    return at.set(values.astype(pages.dtype), mode="drop", unique_indices=True)


def map_prefill(
    attend: Callable[[tuple, Int[Array, ""], Reader, int], Float[Array, "rows *out"]],
    queries: tuple[Array, ...],
    pages: Float[Array, "num_blocks 1 1 page width"],
    meta: PagedPrefill,
    out: jax.ShapeDtypeStruct,
) -> Float[Array, "T *out"]:
    """Runs `attend` over tiles of tokens of one sequence each; padding gives zeros.

    Args:
      attend: (the tile's rows of every array of `queries`, number of its first token in its sequence, the sequence's
        reader, how many tokens a sequence may have at most) -> the tile's results. Rows that are not the sequence's
        come with any token number, negative ones too, and their results are dropped.
      queries: arrays of T rows each.
      pages: the step's own tokens are in them.
      out: shape [T, ...] and dtype of the result.
    """
    tokens = out.shape[0]
    size = min(TILE_ROWS, tokens)
    longest = meta.block_tables.shape[1] * pages.shape[3]
    tiles = -(-jnp.diff(meta.cu_seqlens) // size)
    tiles_end = jnp.cumsum(tiles, dtype=jnp.int32)

    def tile(index: Int[Array, ""], results: Array) -> Array:
        sequence = (tiles_end <= index).sum(dtype=jnp.int32)
        begin, end = meta.cu_seqlens[sequence], meta.cu_seqlens[sequence + 1]
        first = begin + (index - tiles_end[sequence] + tiles[sequence]) * size
        last = jnp.minimum(first + size, end)
        start = jnp.minimum(first, tokens - size)
        shift = meta.prefix_lens[sequence] - begin
        reader = state_reader(pages, meta.block_tables[sequence], last + shift)
        part = tuple(jax.lax.dynamic_slice_in_dim(array, start, size) for array in queries)
        rows = attend(part, start + shift, reader, longest)
        row = start + jnp.arange(size, dtype=jnp.int32)
        mine = ((row >= first) & (row < last)).reshape(-1, *(1,) * (rows.ndim - 1))
        rows = jnp.where(mine, rows, jax.lax.dynamic_slice_in_dim(results, start, size))
        return jax.lax.dynamic_update_slice_in_dim(results, rows, start, 0)

    return jax.lax.fori_loop(0, tiles_end[-1], tile, jnp.zeros(out.shape, out.dtype))


def map_decode(
    attend: Callable[[tuple, Int[Array, ""], Reader, int], Float[Array, "1 *out"]],
    queries: tuple[Array, ...],
    pages: Float[Array, "num_blocks 1 1 page width"],
    meta: PagedDecode,
) -> Float[Array, "B *out"]:
    """Runs `attend` for the one new token of every sequence, arguments as in `map_prefill`; padding gives zeros."""
    longest = meta.block_tables.shape[1] * pages.shape[3]

    def one(inputs: tuple) -> Array:
        rows, length, table = inputs
        out = attend(tuple(row[None] for row in rows), length - 1, state_reader(pages, table, length), longest)[0]
        return jnp.where(length > 0, out, 0)

    return jax.lax.map(
        one, (queries, meta.seq_lens, meta.block_tables), batch_size=min(DECODE_BATCH, len(meta.seq_lens))
    )
