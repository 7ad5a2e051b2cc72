# SPDX-License-Identifier: Apache-2.0
"""Decode attention over pages as one kernel of Pallas' Mosaic back end: every page is read once, where it lies."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Int

from kernels_pallas.blocks import NEVER
from kernels_pallas.mosaic import ROWS
from kernels_pallas.paged_kv import PagedDecode, write_kv

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Plan:
    """Static sizes of one kernel.

    Attributes:
      dtype: bfloat16 or float16, of queries and pages alike.
      group: query heads that share a key head.
      block: tokens that one step reads, some whole pages.
      stages: blocks held in shared memory, all but one of them on their way.
      splits: most parts that a sequence is cut into, each a program of its own.
      split_tokens: tokens that are worth a part.
      longest_first: whether programs start in the order of their lengths.
    """

    dtype: str
    batch: int
    kv_heads: int
    group: int
    width: int
    page: int
    block: int
    stages: int
    splits: int
    split_tokens: int
    longest_first: bool = False

    @property
    def rows(self) -> int:
        """Rows of a group in memory: copies move them eight at a time."""
        return -(-self.group // 8) * 8

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.block // self.page

    def parts(self, length):
        """How many parts a sequence of this length is cut into, each about `split_tokens` long."""
        if self.splits == 1:
            return jnp.ones_like(length)
        return jnp.clip(lax.div(length + self.split_tokens // 2, jnp.int32(self.split_tokens)), 1, self.splits)


@cache
def tuning() -> list[dict]:
    """Rows of the measured table, smallest number of programs first; the last row has no upper bound."""
    return json.loads(resources.files("kernels_pallas").joinpath("paged_decode_mosaic.json").read_text())["rows"]


def make_plan(q: Float[Array, "B N D"], kv_layer: Float[Array, "num_blocks 2 K page D"], table_width: int) -> Plan:
    """The sizes that were measured to be fastest for about this many programs and this long a context."""
    (batch, heads, width), (_, _, kv_heads, page, _) = q.shape, kv_layer.shape
    row = next(row for row in tuning() if row["programs"] is None or batch * kv_heads <= row["programs"])
    splits = min(row["splits"], max(1, round(table_width * page / row["split_tokens"])))
    block = max(64, page)
    stages = max(2, min(row["stages"], (96 << 10) // (4 * block * width)))
    group, tokens, sort = heads // kv_heads, row["split_tokens"], row["longest_first"]
    return Plan(q.dtype.name, batch, kv_heads, group, width, page, block, stages, splits, tokens, sort)


def paged_decode_mosaic(
    q: Float[Array, "B N D"],
    k: Float[Array, "B K D"],
    v: Float[Array, "B K D"],
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    meta: PagedDecode,
    scale: float,
    plan: Plan | None = None,
) -> tuple[Float[Array, "B N D"], Float[Array, "num_blocks 2 K page D"]]:
    """Writes one token a sequence, then lets it attend to its whole sequence; rows of length 0 give zeros.

    Half precision. The cost follows the real lengths: the width of the table and what it holds past them cost nothing.
    """
    kv_layer = write_kv(kv_layer, k, v, meta.slots)
    plan = plan or make_plan(q, kv_layer, meta.block_tables.shape[1])
    grouped = q.reshape(plan.batch, plan.kv_heads, plan.group, plan.width)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, plan.rows - plan.group), (0, 0)))
    rows, pages = grouped.reshape(-1, plan.width), kv_layer.reshape(-1, plan.width)
    lens = order = meta.seq_lens  # an order is read only where there is one: even counting up would cost a kernel
    if plan.longest_first:
        lens, order = lax.sort((-lens, jnp.arange(plan.batch, dtype=jnp.int32)), num_keys=1)
        lens = -lens
    out = _kernel(plan, float(scale))(order, lens, meta.block_tables, rows, pages)
    if plan.splits > 1:
        return join_parts(plan, meta.seq_lens, *out).reshape(q.shape).astype(q.dtype), kv_layer
    return out[0].reshape(q.shape), kv_layer


def join_parts(
    plan: Plan, lens: Int[Array, " B"], out: Float[Array, "rows D"], lse: Float[Array, " rows"]
) -> Float[Array, "B K group D"]:
    """Merges the parts of each sequence by their log-sum-exps (base 2); parts that nobody wrote hold anything."""
    lse = lse.reshape(plan.batch, plan.kv_heads, plan.splits, plan.rows)
    out = out.reshape(*lse.shape, plan.width)
    written = (jnp.arange(plan.splits, dtype=jnp.int32) < plan.parts(lens)[:, None])[:, None, :, None]
    lse = jnp.where(written, lse, NEVER)
    weights = jnp.exp2(lse - lse.max(2, keepdims=True))
    out = (jnp.where(written[..., None], out, 0) * weights[..., None]).sum(2)
    return (out / weights.sum(2)[..., None])[:, :, : plan.group]


def _kernel(plan: Plan, scale: float):
    """(order, lengths, tables, query rows, page rows) -> output rows, and log-sum-exps where sequences are cut."""
    split = plan.splits > 1
    rows = plan.batch * plan.kv_heads * (plan.splits * plan.rows if split else plan.group)
    dtype = jnp.float32 if split else plan.dtype
    out_type = [jax.ShapeDtypeStruct((rows, plan.width), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)]
    stream = _tiled((plan.stages, plan.block, plan.width), plan.dtype)
    # Rows leave tiled shared memory eight at a time; a group of another size leaves a plain array, slower to write.
    whole = split or plan.group == plan.rows
    values = _tiled((ROWS, plan.width), dtype) if whole else plgpu.SMEM((ROWS, plan.width), dtype)
    result = [values, plgpu.SMEM((ROWS,), jnp.float32)]

    def paged_decode(*refs, **scratch):  # the name that profiles show
        _program(plan, scale, *refs, **scratch)

    return plgpu.kernel(
        paged_decode,
        out_type=tuple(out_type[: 1 + split]),
        grid=(plan.splits, plan.kv_heads, plan.batch),
        grid_names=("part", "head", "place"),
        scratch_types={
            "q_smem": _tiled((ROWS, plan.width), plan.dtype),
            "streams": plgpu.RefUnion([stream, stream], result),
            "q_barrier": plgpu.Barrier(),
            "barriers": plgpu.Barrier(num_arrivals=2 * plan.pages, num_barriers=plan.stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )


def _tiled(shape: tuple[int, ...], dtype: DTypeLike):
    """Shared memory in the layout that bulk copies, the matrix unit and its results all want."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _program(
    plan: Plan, scale: float, order_ref, lens_ref, table_ref, q_ref, kv_ref, *outs, q_smem, streams, q_barrier, barriers
):
    """One part of one sequence for one key head."""
    part, head, place = (lax.axis_index(name) for name in ("part", "head", "place"))
    sequence, length = order_ref[place] if plan.longest_first else place, lens_ref[place]
    parts = plan.parts(length)
    row = sequence * plan.kv_heads + head

    @pl.when(part < parts)
    def _():
        blocks = lax.div(length + (plan.block - 1), jnp.int32(plan.block))
        share = lax.div(blocks + parts - 1, parts)
        first = part * share
        steps = jnp.clip(blocks - first, 0, share)
        last_page = jnp.maximum(lax.div(length - 1, jnp.int32(plan.page)), 0)

        def look_up(step):
            at = (first + step) * plan.pages
            return [table_ref[sequence, jnp.minimum(at + i, last_page)] for i in range(plan.pages)]

        def fetch(blocks, slot):
            for i, block in enumerate(blocks):
                for which, smem in enumerate(streams[0]):
                    start = ((block * 2 + which) * plan.kv_heads + head) * plan.page
                    to = smem.at[slot, pl.ds(i * plan.page, plan.page)]
                    plgpu.copy_gmem_to_smem(kv_ref.at[pl.ds(start, plan.page)], to, barriers.at[slot])

        # The group fills the first rows of the matrix unit; the others hold anything, and nobody reads what they give.
        queries = q_ref.at[pl.ds(row * plan.rows, plan.rows)]
        plgpu.copy_gmem_to_smem(queries, q_smem.at[pl.ds(0, plan.rows)], q_barrier)
        ahead = [look_up(stage) for stage in range(plan.stages)]
        for stage in range(plan.stages):
            pl.when(stage < steps)(partial(fetch, ahead[stage], stage))
        plgpu.barrier_wait(q_barrier)

        def step(index, state):
            slot = lax.rem(index, jnp.int32(plan.stages))
            ahead = look_up(index + plan.stages)
            plgpu.barrier_wait(barriers.at[slot])
            k_smem, v_smem = (smem.at[slot] for smem in streams[0])
            state = _add_block(plan, scale, state, q_smem, k_smem, v_smem, length - (first + index) * plan.block)
            pl.when(index + plan.stages < steps)(partial(fetch, ahead, slot))
            return state

        state = lax.fori_loop(0, steps, step, _empty(plan))
        _write(plan, state, row, part, streams[1], outs)


def _empty(plan: Plan):
    """(weighted values, row maxima in base 2, row sums) before any key was seen."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, plan.width), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), NEVER, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row),
    )


def _add_block(plan: Plan, scale: float, state, q_smem, k_smem, v_smem, left):
    """The state after one more block, of whose tokens the first `left` belong to the sequence."""
    values, peak, total = state

    def multiply(acc):
        plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
        return acc[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, plan.block), jnp.float32))

    @pl.when(left < plan.block)
    def _():
        # The weight of what lies past the end is 0, and 0 times NaN is NaN.
        token = plgpu.broadcasted_iota(jnp.int32, (plan.block, plan.width), 0, layout=plgpu.Layout.WGMMA)
        v_smem[...] = jnp.where(token < left, plgpu.load(v_smem, layout=plgpu.Layout.WGMMA), 0)
        plgpu.commit_smem()

    token = plgpu.broadcasted_iota(jnp.int32, (ROWS, plan.block), 1, layout=plgpu.Layout.WGMMA)
    scores = jnp.where(token < left, scores * (scale * LOG2_E), NEVER)
    new_peak = jnp.maximum(peak, scores.max(axis=1))
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    fade = jnp.exp2(peak - new_peak)
    values = values * lax.broadcast_in_dim(fade, values.shape, [0])
    weighted = pl.run_state(lambda acc: plgpu.wgmma(acc, weights.astype(plan.dtype), v_smem))
    return weighted(plgpu.ACC.init(values)), new_peak, total * fade + weights.sum(axis=1)


def _write(plan: Plan, state, row, part, result, outs):
    """Sends the rows of the group to their place in memory."""
    values, peak, total = state
    out_smem, lse_smem = result
    total = jnp.where(total > 0, total, 1.0)
    out_smem[...] = (values / lax.broadcast_in_dim(total, values.shape, [0])).astype(out_smem.dtype)
    if plan.splits > 1:
        lse_smem[...] = peak + jnp.log2(total)
    plgpu.commit_smem()
    rows, at = (plan.rows, row * plan.splits + part) if plan.splits > 1 else (plan.group, row)
    for smem, out in zip(result, outs, strict=False):
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, rows)], out.at[pl.ds(at * rows, rows)])
    plgpu.wait_smem_to_gmem(0)
