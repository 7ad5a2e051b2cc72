# SPDX-License-Identifier: Apache-2.0
"""Attention over paged keys and values in plain XLA: loops whose trip counts follow the real lengths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.blocks import add_keys, empty_softmax, finish, group_heads, ungroup_heads
from kernels_pallas.paged_kv import PagedDecode, PagedPrefill, read_pages, write_kv

# Queries of one tile, and tokens of context that a loop step reads: small, since a step is never cut short.
TILE_ROWS = 128
STEP_TOKENS = 128
# Elements of the pages that one decode step gathers for all its sequences.
STEP_ELEMENTS = 1 << 23


def paged_prefill_xla(
    q: Float[Array, "T N D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    meta: PagedPrefill,
    scale: float,
) -> tuple[Float[Array, "T N D"], Float[Array, "num_blocks 2 K page D"]]:
    """Writes the chunks into their pages, then lets each token attend to its sequence up to itself.

    Chunks are cut into tiles of one sequence each, and a tile reads only that sequence's pages, so the work is
    the sum over the chunks of chunk x context and no sequence can touch another's result.
    """
    kv_layer = write_kv(kv_layer, k, v, meta.slots)
    tokens = q.shape[0]
    size = min(TILE_ROWS, tokens)
    tiles = -(-jnp.diff(meta.cu_seqlens) // size)
    tiles_end = jnp.cumsum(tiles, dtype=jnp.int32)

    def tile(index, out):
        sequence = (tiles_end <= index).sum(dtype=jnp.int32)
        begin, end = meta.cu_seqlens[sequence], meta.cu_seqlens[sequence + 1]
        first = begin + (index - tiles_end[sequence] + tiles[sequence]) * size
        last = jnp.minimum(first + size, end)
        start = jnp.minimum(first, tokens - size)
        row = start + jnp.arange(size, dtype=jnp.int32)
        shift = meta.prefix_lens[sequence] - begin
        rows = _attend_tile(
            jax.lax.dynamic_slice_in_dim(q, start, size),
            row + shift,
            kv_layer,
            meta.block_tables[sequence],
            last + shift,
            scale,
        )
        mine = ((row >= first) & (row < last))[:, None, None]
        rows = jnp.where(mine, rows, jax.lax.dynamic_slice_in_dim(out, start, size))
        return jax.lax.dynamic_update_slice_in_dim(out, rows, start, 0)

    return jax.lax.fori_loop(0, tiles_end[-1], tile, jnp.zeros_like(q)), kv_layer


def _attend_tile(q, position, kv_layer, blocks, length, scale):
    """Rows of one sequence, at `position` in it, attend to its first `length` tokens up to themselves."""
    _, _, kv_heads, page, _ = kv_layer.shape
    size, heads, _ = q.shape
    count = max(1, min(STEP_TOKENS // page, blocks.shape[0]))
    columns = count * page
    grouped = group_heads(q, kv_heads)
    position = jnp.tile(position, heads // kv_heads)

    def step(index, state):
        column = index * columns + jnp.arange(columns, dtype=jnp.int32)
        ids = blocks.at[index * count + jnp.arange(count, dtype=jnp.int32)].get(mode="clip")
        keys, values = read_pages(kv_layer, ids, column < length, q.dtype)
        return add_keys(state, grouped, keys, values, (column <= position[:, None]) & (column < length), scale)

    state = jax.lax.fori_loop(0, -(-length // columns), step, empty_softmax(*grouped.shape))
    return ungroup_heads(finish(state), size).astype(q.dtype)


def paged_decode_xla(
    q: Float[Array, "B N D"],
    k: Float[Array, "B K D"],
    v: Float[Array, "B K D"],
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    meta: PagedDecode,
    scale: float,
) -> tuple[Float[Array, "B N D"], Float[Array, "num_blocks 2 K page D"]]:
    """Writes one token a sequence, then lets it attend to its whole sequence; rows of length 0 give zeros.

    All sequences advance together, a few pages a step, until the longest is done.
    """
    kv_layer = write_kv(kv_layer, k, v, meta.slots)
    _, _, kv_heads, page, _ = kv_layer.shape
    batch, heads, width = q.shape
    tokens = min(STEP_TOKENS, STEP_ELEMENTS // (batch * kv_heads * width * 2))
    count = max(1, min(tokens // page, meta.block_tables.shape[1]))
    columns = count * page
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)

    def step(index, state):
        column = index * columns + jnp.arange(columns, dtype=jnp.int32)
        valid = column < meta.seq_lens[:, None]
        ids = meta.block_tables.at[:, index * count + jnp.arange(count, dtype=jnp.int32)].get(mode="clip")
        keys, values = read_pages(kv_layer, ids, valid, q.dtype)
        return add_keys(state, grouped, keys, values, valid[:, None, None, :], scale)

    steps = -(-meta.seq_lens.max() // columns)
    out = finish(jax.lax.fori_loop(0, steps, step, empty_softmax(*grouped.shape))).reshape(q.shape)
    return jnp.where((meta.seq_lens > 0)[:, None, None], out, 0).astype(q.dtype), kv_layer
