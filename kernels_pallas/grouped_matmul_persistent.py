# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product as a Hopper kernel for many rows a group, with the gate of an MLP inside if wanted.

One thread block stays on each multiprocessor and makes tile after tile: a warpgroup loads, without a pause between
tiles, and two multiply. What counts here is to keep the matrix units busy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels_pallas.row_groups import RowGroups

# Columns of the matrix in a tile, how much of the inner dimension a step loads, and steps in flight: with the tile's
# way out they fill the shared memory of a multiprocessor.
COLUMNS, DEPTH, STEPS = 256, 64, 4
# Columns that a warpgroup writes at a time.
OUT_COLUMNS = 64
MULTIPROCESSORS = 132  # of an H100 or H200; with fewer, thread blocks wait for each other
LOADER_REGISTERS = 40


def grouped_matmul_persistent(
    x: Float[Array, "places K"],
    weights: Float[Array, "X K N"],
    groups: RowGroups,
    *,
    gated: bool = False,
    multiprocessors: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> Float[Array, "places N"]:
    """Each block's rows times its group's matrix; blocks without rows come back undefined.

    Half precision, 64 or 128 rows a block, `K` a multiple of `DEPTH` and `N` of `COLUMNS`.

    Args:
      gated: the result is silu(gate) * up, [places, N / 2], of a product that holds gate, then up. Sums
        stay in float32 until then.
    """
    sizes = _Sizes(groups.block_rows, x.shape[1], weights.shape[2], 1 + gated, x.dtype)

    def grouped_matmul(*refs):  # the name that profiles show
        _program(sizes, *refs)

    run = plgpu.kernel(
        grouped_matmul,
        out_type=jax.ShapeDtypeStruct((len(x), sizes.outer), x.dtype),
        grid=(multiprocessors,),
        grid_names=("multiprocessor",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(groups.group, groups.count[None], x, weights)


class _Sizes(NamedTuple):
    """Static sizes of one kernel; `parts` is 2 where the product holds a gate and an up, else 1."""

    rows: int
    inner: int
    width: int
    parts: int
    dtype: Any

    @property
    def outer(self) -> int:
        """Columns of the result."""
        return self.width // self.parts

    @property
    def columns(self) -> int:
        """Columns of the result in a tile."""
        return COLUMNS // self.parts

    @property
    def mine(self) -> int:
        """Columns that one warpgroup makes."""
        return self.columns // 2


def _program(sizes: _Sizes, group_ref, count_ref, x_ref, weights_ref, out_ref):
    """One thread block: every so many-th tile of all, as long as there are some."""
    rows, parts, outer, columns, mine = sizes.rows, sizes.parts, sizes.outer, sizes.columns, sizes.mine
    warpgroup, tiles = lax.axis_index("warpgroup"), outer // columns
    own = pl.ds(warpgroup * mine, mine)

    def multiply(_, x_part, *rest):
        *matrix_parts, totals = rest
        for total, matrix_part in zip(totals, matrix_parts, strict=True):
            plgpu.wgmma(total, x_part, matrix_part.at[:, own])
        plgpu.wgmma_wait(1)
        return totals

    def make_tiles(buffers, staged):
        @plgpu.nd_loop((count_ref[0] * tiles,), collective_axes="multiprocessor")
        def _(loop):
            block, tile = lax.div(loop.index[0], jnp.int32(tiles)), lax.rem(loop.index[0], jnp.int32(tiles))
            place = pl.ds(block * rows, rows)

            def store(value):
                for start in range(0, mine, OUT_COLUMNS):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    staged[warpgroup] = value[:, start : start + OUT_COLUMNS]
                    plgpu.commit_smem()
                    first = tile * columns + warpgroup * mine + start
                    plgpu.copy_smem_to_gmem(staged.at[warpgroup], out_ref.at[place, pl.ds(first, OUT_COLUMNS)])

            def context(run):
                def with_totals(*totals):
                    run(totals)
                    store(_finish(*(total[...] for total in totals), dtype=sizes.dtype))

                pl.run_scoped(with_totals, *[plgpu.ACC((rows, mine))] * parts)

            matrix = weights_ref.at[group_ref[block]]
            slices = [pl.ds(part * outer + tile * columns, columns) for part in range(parts)]
            matrices = [matrix.at[:, each] for each in slices]
            _pipeline(sizes, multiply, context)(x_ref.at[place, :], *matrices, allocations=buffers)

    pipeline = _pipeline(sizes, multiply, lambda run: None)
    buffers = pipeline.get_allocations(x_ref, *[weights_ref.at[0]] * parts)
    out_buffer = plgpu.SMEM((2, rows, OUT_COLUMNS), sizes.dtype)
    pl.run_scoped(make_tiles, buffers=buffers, staged=out_buffer, collective_axes="warpgroup")
    plgpu.wait_smem_to_gmem(0)


def _pipeline(sizes: _Sizes, step: Callable, context: Callable):
    """Runs `step` over the inner dimension within `context`, one warpgroup loading ahead of the two that multiply."""
    matrix_spec = plgpu.BlockSpec((DEPTH, sizes.columns), lambda k: (k, 0), delay_release=1)
    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(sizes.inner // DEPTH,),
        in_specs=[
            plgpu.BlockSpec((sizes.rows, DEPTH), lambda k: (0, k), delay_release=1),
            *[matrix_spec] * sizes.parts,
        ],
        max_concurrent_steps=STEPS,
        compute_context=context,
        memory_registers=LOADER_REGISTERS,
        num_compute_wgs=2,
        wg_axis="warpgroup",
    )


def _finish(
    total: Float[Array, "rows mine"], up: Float[Array, "rows mine"] | None = None, *, dtype: Any
) -> Float[Array, "rows mine"]:
    """A tile's result in `dtype`: the sum itself, or of a gate's and an up's sum silu(gate) * up."""
    if up is None:
        return total.astype(dtype)
    return (total * (1.0 / (1.0 + jnp.exp(-total))) * up).astype(dtype)
