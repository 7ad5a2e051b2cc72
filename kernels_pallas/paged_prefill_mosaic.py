# SPDX-License-Identifier: Apache-2.0
"""Paged prefill attention as one kernel of Pallas' Mosaic back end: chunks behind their cached prefixes, causal.

A chunk's keys and values are written into its pages first, and every key is read from pages: one pass, and nobody has
to know how long prefixes are before it starts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention_tiles import cut_to_tiles
from kernels_pallas.mosaic import ROW_TILE, packed_tuning
from kernels_pallas.mosaic_attention import Plan, attention_kernel
from kernels_pallas.paged_kv import PagedPrefill, write_kv


class ChunkTile(NamedTuple):
    """Queries of one head of the chunk [start, end), which stands behind `prefix` tokens of its `sequence`."""

    head: Any
    first: Any
    start: Any
    end: Any
    steps: Any
    sequence: Any
    prefix: Any

    def first_key(self, step, keys):
        return step * keys

    def hides(self, key, keys, row):
        return key + keys > self.prefix + jnp.maximum(row, self.start) - self.start + 1

    def sees(self, row, key):
        return key <= self.prefix + row - self.start

    def has(self, key):
        return key < self.prefix + self.end - self.start


def make_plan(q: Float[Array, "T N D"], kv_layer: Float[Array, "num_blocks 2 K page D"], sequences: int) -> Plan:
    """The sizes of packed attention with this head dim, whose inner loop is the same."""
    tokens, heads, width = q.shape
    row, page = packed_tuning()[width], kv_layer.shape[3]
    return Plan(
        q.dtype.name,
        tokens,
        sequences,
        heads,
        kv_layer.shape[2],
        width,
        row["groups"],
        row["keys"],
        row["stages"],
        tuple(row["registers"]),
        copies=row["keys"] // page,
    )


def paged_prefill_mosaic(
    q: Float[Array, "T N D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    meta: PagedPrefill,
    scale: float,
    plan: Plan | None = None,
) -> tuple[Float[Array, "T N D"], Float[Array, "num_blocks 2 K page D"]]:
    """Writes the chunks into their pages, then lets each token attend to its sequence up to itself.

    Half precision, T a multiple of 8, a positive scale. Tokens past cu_seqlens[-1] give zeros, whatever they hold, and
    what pages hold past a sequence's end reaches nobody.
    """
    kv_layer = write_kv(kv_layer, k, v, meta.slots)
    plan = plan or make_plan(q, kv_layer, len(meta.prefix_lens))
    kernel = attention_kernel("paged_prefill", plan, float(scale), ChunkTile, _load_block)
    table = tile_table(plan, meta.cu_seqlens, meta.prefix_lens)
    pages = kv_layer.reshape(-1, plan.width)
    return kernel(table, q, meta.block_tables, pages), kv_layer


def tile_table(plan: Plan, cu_seqlens: Int[Array, "S+1"], prefix_lens: Int[Array, " S"]) -> Int[Array, "tiles+1 6"]:
    """First row, chunk start and end, steps over keys, sequence and prefix of each tile; the last row counts them.

    A chunk's last tiles, which see the most keys, come first, so that programs end together.
    """
    tiles = cut_to_tiles(plan, cu_seqlens, last_first=True)
    prefix = jnp.append(prefix_lens, 0)[tiles.segment]
    keys = prefix + jnp.minimum(tiles.first + plan.rows, tiles.end) - tiles.start
    return tiles.table(-(-keys // plan.keys), jnp.where(tiles.real, tiles.segment, 0), prefix)


def _load_block(plan: Plan, arrays, tile: ChunkTile, kv_head, step, which, place, barrier):
    """A page at a time; past the sequence's end its last page again, whose place no query sees."""
    tables, pages = arrays
    page = plan.keys // plan.copies
    last_page = lax.div(tile.prefix + tile.end - tile.start - 1, jnp.int32(page))
    for i in range(plan.copies):
        block = tables[tile.sequence, jnp.minimum(step * plan.copies + i, last_page)]
        start = pl.multiple_of(((block * 2 + which) * plan.kv_heads + kv_head) * page, ROW_TILE)
        plgpu.copy_gmem_to_smem(pages.at[pl.ds(start, page)], place.at[pl.ds(i * page, page)], barrier)
