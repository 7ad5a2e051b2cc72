# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product as a Hopper kernel for many rows a group, with the gate of an MLP inside if wanted.

One thread block stays on each multiprocessor and makes tile after tile: a warpgroup loads, without a pause between
tiles, and two multiply. What counts here is to keep the matrix units busy.
"""

from __future__ import annotations

from typing import Any

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
      gated: the result is silu(gate) * up, [places, N / 2], of a product that holds gate, then up. Every step is
        rounded as separate operations would round it.
    """
    (places, inner), rows, parts = x.shape, groups.block_rows, 1 + gated
    outer, columns = weights.shape[2] // parts, COLUMNS // parts  # of the result, and of a tile of it
    tiles, mine = outer // columns, columns // 2  # `mine`: columns of one warpgroup

    def kernel(group_ref, count_ref, x_ref, weights_ref, out_ref):
        warpgroup = lax.axis_index("warpgroup")
        own = pl.ds(warpgroup * mine, mine)

        def pipeline(step, context):
            matrix_spec = plgpu.BlockSpec((DEPTH, columns), lambda k: (k, 0), delay_release=1)
            return plgpu.emit_pipeline_warp_specialized(
                step,
                grid=(inner // DEPTH,),
                in_specs=[plgpu.BlockSpec((rows, DEPTH), lambda k: (0, k), delay_release=1), *[matrix_spec] * parts],
                max_concurrent_steps=STEPS,
                compute_context=context,
                memory_registers=LOADER_REGISTERS,
                num_compute_wgs=2,
                wg_axis="warpgroup",
            )

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
                        store(_finish(*(total[...] for total in totals), dtype=x.dtype))

                    pl.run_scoped(with_totals, *[plgpu.ACC((rows, mine))] * parts)

                matrix = weights_ref.at[group_ref[block]]
                slices = [pl.ds(part * outer + tile * columns, columns) for part in range(parts)]
                matrices = [matrix.at[:, each] for each in slices]
                pipeline(multiply, context)(x_ref.at[place, :], *matrices, allocations=buffers)

        buffers = pipeline(multiply, lambda run: None).get_allocations(x_ref, *[weights_ref.at[0]] * parts)
        out_buffer = plgpu.SMEM((2, rows, OUT_COLUMNS), x.dtype)
        pl.run_scoped(make_tiles, buffers=buffers, staged=out_buffer, collective_axes="warpgroup")
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((places, outer), x.dtype),
        grid=(multiprocessors,),
        grid_names=("multiprocessor",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(groups.group, groups.count[None], x, weights)


def _finish(
    total: Float[Array, "rows mine"], up: Float[Array, "rows mine"] | None = None, *, dtype: Any
) -> Float[Array, "rows mine"]:
    """A tile's result in `dtype`: the sum itself, or of a gate's and an up's sum silu(gate) * up."""
    if up is None:
        return total.astype(dtype)
    gate, up = (value.astype(dtype).astype(jnp.float32) for value in (total, up))
    opened = (gate * (1.0 / (1.0 + jnp.exp(-gate)))).astype(dtype).astype(jnp.float32)
    return (opened * up).astype(dtype)
