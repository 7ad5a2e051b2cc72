# SPDX-License-Identifier: Apache-2.0
"""What Hopper kernels of attention over many queries share: programs that go through tiles, and an online softmax.

A tile is some queries of one head. Which keys they see, and where those lie, is the business of the kernel that uses
this: it gives a class of tiles and a function that starts the copies of a block of keys or values. The method is
FlashAttention-3's (https://arxiv.org/abs/2407.08608) without its pipelines inside a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from kernels_pallas.mosaic import ROW_TILE, ROWS

LOG2_E = math.log2(math.e)
# Columns of a row that stay apart while weights are summed: as many as one thread's share spans.
LANES = 8
_BY_ROW, _BY_LANE = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Plan:
    """Static sizes of one kernel.

    A program has `groups` of 128 threads that compute, each for 64 queries, and one more group that loads keys and
    values, `keys` at a time, into `stages` places of shared memory. `registers`: of a thread that computes, and of one
    that loads. `width`: the head dim, or a larger one that the matrix unit takes. `copies`: how many fill a place.
    """

    dtype: str
    tokens: int
    segments: int
    heads: int
    kv_heads: int
    width: int
    groups: int
    keys: int
    stages: int
    registers: tuple[int, int]
    copies: int = 1

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.groups * ROWS

    @property
    def tiles(self) -> int:
        """Most tiles of one head: every segment, and the padding, may begin one that it does not fill."""
        return -(-self.tokens // self.rows) + self.segments + 1

    @property
    def programs(self) -> int:
        """One for each tile of a few long segments. Many short ones make more tiles, which are taken in turns."""
        full = -(-self.tokens // self.rows)
        return self.heads * min(self.tiles, full + full // 4 + 2)


class Tile(Protocol):
    """What a program does next: some queries of one head, from row `first` on, of which [start, end) are its own.

    A NamedTuple of the head and of what a row of the tile table says.
    """

    head: Any
    first: Any
    start: Any
    end: Any
    steps: Any

    def first_key(self, step: Any, keys: int) -> Any:
        """The key that a block of `keys` begins with."""

    def hides(self, key: Any, keys: int, row: Any) -> Any:
        """Whether some key of the block from `key` on is hidden from `row` or a later one, or is none at all."""

    def sees(self, row: Any, key: Any) -> Any:
        """Whether a query sees a key."""

    def has(self, key: Any) -> Any:
        """Whether there is such a key: what else lies in its place may be NaN."""


# (plan, arrays, tile, key head, step, 0 for keys and 1 for values, place in shared memory, barrier).
LoadBlock = Callable[..., None]


def attention_kernel(name: str, plan: Plan, scale: float, tile: type[Tile], load_block: LoadBlock):
    """(tile table, q [tokens, heads, width], arrays that `load_block` reads) -> output, shaped like q.

    Rows that are in no tile come back undefined. Of the tile table, the last row counts the tiles in use.
    """

    def program(table, q, *rest, **scratch):
        *arrays, out = rest
        _program(plan, scale, tile, load_block, table, q, arrays, out, **scratch)

    program.__name__ = name  # profiles show it
    per_group = plgpu.Barrier(num_barriers=plan.groups)
    full = plgpu.Barrier(num_arrivals=plan.copies, num_barriers=plan.stages)
    free = plgpu.Barrier(num_arrivals=plan.groups, num_barriers=plan.stages)
    stream = _tiled((plan.stages, plan.keys, plan.width), plan.dtype)
    return plgpu.kernel(
        program,
        out_type=jax.ShapeDtypeStruct((plan.tokens, plan.heads, plan.width), plan.dtype),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=plan.groups + 1,
        thread_name="group",
        scratch_types={
            "q_smem": _tiled((plan.groups, ROWS, plan.width), plan.dtype),
            "streams": [stream, stream],
            "q_barriers": [per_group, per_group],
            "barriers": [[full, free], [full, free]],
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def _tiled(shape: tuple[int, ...], dtype: str):
    """Shared memory in the layout that bulk copies and the matrix unit want."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _program(
    plan: Plan, scale: float, tile_type, load_block, table, q, arrays, out, *, q_smem, streams, q_barriers, barriers
):
    """Every group goes through the same tiles, and through the same blocks of keys in each."""
    group = lax.axis_index("group")

    @pl.when(group == plan.groups)
    def _():
        plgpu.set_max_registers(plan.registers[1], action="decrease")
        load = partial(_load_tile, plan, load_block, q, arrays, (q_smem, *streams), q_barriers, barriers)
        turns, blocks = _over_tiles(plan, tile_type, table, load)
        _wait_for_the_last(plan, turns, blocks, q_barriers, barriers)

    @pl.when(group < plan.groups)
    def _():
        plgpu.set_max_registers(plan.registers[0], action="increase")
        smem = q_smem.at[group], *streams
        own = [barrier.at[group] for barrier in q_barriers]
        _over_tiles(plan, tile_type, table, partial(_compute_tile, plan, scale, group, out, smem, own, barriers))


def _over_tiles(plan: Plan, tile_type: type[Tile], table, body):
    """body(turn, blocks of keys before this tile, tile) for each tile of this program; a head's tiles are neighbours.

    Returns the number of turns and of blocks.
    """
    program, tiles = lax.axis_index("program"), table[plan.tiles, 0]

    def turn(index, blocks):
        place = program + index * plan.programs
        head, row = lax.div(place, tiles), lax.rem(place, tiles)
        tile = tile_type(head, *(table[row, column] for column in range(table.shape[1])))
        body(index, blocks, tile)
        return blocks + tile.steps

    turns = lax.div(tiles * plan.heads - program + (plan.programs - 1), jnp.int32(plan.programs))
    return turns, lax.fori_loop(0, turns, turn, jnp.int32(0))


def _slot(plan: Plan, block):
    """Where in shared memory a block of keys or values lies."""
    if plan.stages & (plan.stages - 1) == 0:
        return block & (plan.stages - 1)
    return lax.rem(block, jnp.int32(plan.stages))


def _load_tile(plan: Plan, load_block, q, arrays, smem, q_barriers, barriers, turn, blocks, tile: Tile):
    """Starts the copies of the tile's queries, keys and values, each as soon as its place is free."""
    q_smem, *streams = smem
    q_full, q_free = q_barriers
    for group in range(plan.groups):
        rows = pl.ds(pl.multiple_of(tile.first + group * ROWS, ROW_TILE), ROWS)
        pl.when(turn > 0)(partial(plgpu.barrier_wait, q_free.at[group]))
        plgpu.copy_gmem_to_smem(q.at[rows, tile.head], q_smem.at[group], q_full.at[group])
    kv_head = lax.div(tile.head, jnp.int32(plan.heads // plan.kv_heads))

    def load(step, _):
        slot = _slot(plan, blocks + step)
        for which, (stream, (full, free)) in enumerate(zip(streams, barriers, strict=True)):
            pl.when(blocks + step >= plan.stages)(partial(plgpu.barrier_wait, free.at[slot]))
            load_block(plan, arrays, tile, kv_head, step, which, stream.at[slot], full.at[slot])

    lax.fori_loop(0, tile.steps, load, None)


def _wait_for_the_last(plan: Plan, turns, blocks, q_barriers, barriers):
    """Sees every place in shared memory freed, as nothing is loaded there any more."""
    for group in range(plan.groups):
        pl.when(turns > 0)(partial(plgpu.barrier_wait, q_barriers[1].at[group]))
    for slot in range(plan.stages):
        for _, free in barriers:
            pl.when(slot < blocks)(partial(plgpu.barrier_wait, free.at[slot]))


def _compute_tile(plan: Plan, scale, group, out, smem, q_barriers, barriers, turn, blocks, tile: Tile):
    """One group's 64 rows of the tile; a group past the end of the segment only lets the blocks pass."""
    q_smem, *streams = smem
    q_full, q_free = q_barriers
    first = tile.first + group * ROWS

    def compute():
        step = partial(_add_block, plan, scale, tile, first, q_smem, streams, barriers, blocks)
        values, _, total = lax.fori_loop(0, tile.steps, step, _empty(plan))
        total = total.sum(axis=1)
        values = values * _over_columns(1 / jnp.where(total > 0, total, 1.0), values)
        _store(values.astype(plan.dtype), first, tile, q_smem, out)

    def let_pass():
        def release(step, _):
            slot = _slot(plan, blocks + step)
            for full, free in barriers:
                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_arrive(free.at[slot])

        lax.fori_loop(0, tile.steps, release, None)

    plgpu.barrier_wait(q_full)
    lax.cond(first < tile.end, compute, let_pass)
    plgpu.barrier_arrive(q_free)


def _empty(plan: Plan):
    """(weighted values, row maxima in base 2, sums of weights by lane) before any key was seen."""
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, plan.width), jnp.float32), _BY_LANE),
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS, LANES), jnp.float32), _BY_LANE),
    )


def _over_columns(row_values, like):
    return lax.broadcast_in_dim(row_values, like.shape, [0])


def _add_block(plan: Plan, scale, tile: Tile, first, q_smem, streams, barriers, blocks, step, state):
    """The state after one more block of keys; of the first one, each of the tile's own queries sees some."""
    values, peak, total = state
    slot, key = _slot(plan, blocks + step), tile.first_key(step, plan.keys)
    k_smem, v_smem = (stream.at[slot] for stream in streams)
    (k_full, k_free), (v_full, v_free) = ([barrier.at[slot] for barrier in pair] for pair in barriers)
    at_edge = tile.hides(key, plan.keys, first)

    plgpu.barrier_wait(k_full)
    scores = _scores(plan, q_smem, k_smem)
    plgpu.barrier_arrive(k_free)
    scores = lax.cond(at_edge, partial(_mask, tile, first, key), lambda x: x, scores)
    # Base 2, with the scale inside the exponent's multiply-add.
    new_peak = jnp.maximum(peak, scores.max(axis=1) * (scale * LOG2_E))
    fade = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores * (scale * LOG2_E) - _over_columns(new_peak, scores))
    total = total * _over_columns(fade, total)
    total += sum(weights[:, i : i + LANES] for i in range(0, plan.keys, LANES))
    values = values * _over_columns(fade, values)
    plgpu.barrier_wait(v_full)
    whole = tile.has(key) & tile.has(key + (plan.keys - 1))
    pl.when(jnp.logical_not(whole))(partial(_clean, plan, tile, key, v_smem))
    values = _weigh(values, weights.astype(plan.dtype), v_smem)
    plgpu.barrier_arrive(v_free)
    return values, new_peak, total


def _scores(plan: Plan, q_smem, k_smem):
    def multiply(acc):
        plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, plan.keys), jnp.float32))


def _weigh(values, weights, v_smem):
    return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v_smem))(plgpu.ACC.init(values))


def _mask(tile: Tile, first, key, scores):
    """No weight for keys that a query does not see."""
    row, key = (
        plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=_BY_LANE) + offset
        for axis, offset in enumerate((first, key))
    )
    return jnp.where(tile.sees(row, key), scores, -jnp.inf)


def _clean(plan: Plan, tile: Tile, key, v_smem):
    """Zeros where there is no value: its weight is 0, and 0 times NaN is NaN. All groups write the same."""
    for begin in sorted({*range(0, plan.keys - ROWS + 1, ROWS), plan.keys - ROWS}):
        part = v_smem.at[pl.ds(begin, ROWS)]
        row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=_BY_LANE) + (key + begin)
        values = plgpu.load(part, layout=_BY_LANE)
        part[...] = jnp.where(tile.has(row), values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _store(rows, first, tile: Tile, smem, out):
    """Sends the rows of the segment to their place, through `smem` if all 64 are of it."""
    whole = (first >= tile.start) & (first + ROWS <= tile.end)

    @pl.when(whole)
    def _():
        smem[...] = rows
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out.at[pl.ds(pl.multiple_of(first, ROW_TILE), ROWS), tile.head])
        plgpu.wait_smem_to_gmem(0)

    pl.when(jnp.logical_not(whole))(partial(_store_some, rows, out, first, tile.start, tile.end, tile.head))


def _store_some(rows, out, first, start, end, head):
    """Writes those of `rows` that lie in [start, end), each thread its own values."""
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(_BY_LANE, plgpu.RefType(), scalar, scalar, scalar, scalar))
    def store(_, rows: mgpu.FragmentedArray, out: ir.Value, *scalars: mgpu.FragmentedArray):
        first, start, end, head = (arith.index_cast(ir.IndexType.get(), x.registers.flat[0]) for x in scalars)

        @rows.foreach
        def _(value, place):
            row = arith.addi(place[0], first)
            after = arith.cmpi(arith.CmpIPredicate.sge, row, start)
            before = arith.cmpi(arith.CmpIPredicate.slt, row, end)
            branch = scf.IfOp(arith.andi(after, before))
            with ir.InsertionPoint(branch.then_block):
                memref.store(value, out, [row, head, place[1]])
                scf.yield_([])

    store(rows, out, first, start, end, head)
