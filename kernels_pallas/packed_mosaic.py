# SPDX-License-Identifier: Apache-2.0
"""Packed bidirectional attention as one kernel of Pallas' Mosaic back end, for the head dims of vision towers."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.attention_tiles import cut_to_tiles
from kernels_pallas.mosaic import ROW_TILE, SHORT, packed_tuning
from kernels_pallas.mosaic_attention import Plan, attention_kernel
from kernels_pallas.packed_xla import packed_attention_xla


class SegmentTile(NamedTuple):
    """Queries of one head of the segment [start, end), and all keys of that segment."""

    head: Any
    first: Any
    start: Any
    end: Any
    steps: Any

    def first_key(self, step, keys):
        return self.start // ROW_TILE * ROW_TILE + step * keys

    def hides(self, key, keys, row):
        return (key < self.start) | (key + keys > self.end)

    def sees(self, row, key):
        return self.has(key)

    def has(self, key):
        return (key >= self.start) & (key < self.end)


def make_plan(q: Float[Array, "P N D"], k: Float[Array, "P K D"], segments: int, longest: int | None = None) -> Plan:
    """The sizes that were measured to be fastest for this head dim, and for segments of at most `longest` tokens."""
    tokens, heads, width = q.shape
    row = packed_tuning()[width]
    if longest is not None and longest <= SHORT:
        row = row | row["short"]
    return Plan(
        q.dtype.name,
        tokens,
        segments,
        heads,
        k.shape[1],
        row["width"],
        row["groups"],
        row["keys"],
        row["stages"],
        tuple(row["registers"]),
    )


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def packed_attention_mosaic(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    cu_seqlens: Int[Array, "S+1"],
    scale: float,
    plan: Plan | None = None,
) -> Float[Array, "P N D"]:
    """Attention inside each packed segment; tokens past cu_seqlens[-1] give zeros, whatever they hold.

    Half precision, P a multiple of 8, a positive scale. A segment reads no value of another one, so what padding or
    other segments hold never reaches it. Gradients are XLA's.
    """
    plan = plan or make_plan(q, k, cu_seqlens.shape[0] - 1)
    head_dim = q.shape[2]
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, plan.width - head_dim))) for x in (q, k, v))
    kernel = attention_kernel("packed_attention", plan, float(scale), SegmentTile, _load_block)
    return kernel(tile_table(plan, cu_seqlens), q, k, v)[..., :head_dim]


def _save_for_gradient(q, k, v, cu_seqlens, scale, plan):
    return packed_attention_mosaic(q, k, v, cu_seqlens, scale, plan), (q, k, v, cu_seqlens)


def _gradient(scale, _, saved, d_out):
    q, k, v, cu_seqlens = saved
    _, pull_back = jax.vjp(lambda *qkv: packed_attention_xla(*qkv, cu_seqlens, scale), q, k, v)
    return *pull_back(d_out), None


packed_attention_mosaic.defvjp(_save_for_gradient, _gradient)


def tile_table(plan: Plan, cu_seqlens: Int[Array, "S+1"]) -> Int[Array, "tiles+1 4"]:
    """First row, segment start, segment end and steps over keys of each tile; the last row counts the tiles in use."""
    tiles = cut_to_tiles(plan, cu_seqlens)
    return tiles.table(-(-(tiles.end - tiles.base) // plan.keys))


def _load_block(plan: Plan, arrays, tile: SegmentTile, kv_head, step, which, place, barrier):
    rows = pl.ds(pl.multiple_of(tile.first_key(step, plan.keys), ROW_TILE), plan.keys)
    plgpu.copy_gmem_to_smem(arrays[which].at[rows, kv_head], place, barrier)
