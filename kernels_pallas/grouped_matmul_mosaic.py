# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product as a Hopper kernel: each thread block makes one tile of one block's result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels_pallas.row_groups import RowGroups

# Columns of a tile, and how much of the inner dimension a pipeline step loads.
TILE_COLUMNS, STEP_DEPTH = 128, 64
# Steps in flight; the shared memory of two thread blocks then fits one multiprocessor.
STEPS = 3


def grouped_matmul_mosaic(
    x: Float[Array, "places K"],
    weights: Float[Array, "X K N"],
    groups: RowGroups,
    *,
    tile_columns: int = TILE_COLUMNS,
    step_depth: int = STEP_DEPTH,
    steps: int = STEPS,
    interpret: Any = None,
) -> Float[Array, "places N"]:
    """Each block's rows times its group's matrix; blocks without rows come back undefined.

    Half precision, 64 or 128 rows a block, `K` a multiple of `step_depth` and `N` of `tile_columns`.
    """
    (places, inner), outer, rows = x.shape, weights.shape[2], groups.block_rows
    tiles = outer // tile_columns

    def kernel(group_ref, count_ref, x_ref, weights_ref, out_ref):
        # Tiles of one block are neighbours: they share its rows, and blocks of one group share its matrix.
        index = lax.axis_index("tile")
        block, tile = lax.div(index, jnp.int32(tiles)), lax.rem(index, jnp.int32(tiles))

        @pl.when(block < count_ref[0])
        def _():
            matrix = weights_ref.at[group_ref[block]]

            def multiply(total):
                plgpu.emit_pipeline(
                    lambda _, x_part, matrix_part: plgpu.wgmma(total, x_part, matrix_part),
                    grid=(inner // step_depth,),
                    in_specs=[
                        plgpu.BlockSpec((rows, step_depth), lambda step: (block, step), delay_release=1),
                        plgpu.BlockSpec((step_depth, tile_columns), lambda step: (step, tile), delay_release=1),
                    ],
                    max_concurrent_steps=steps,
                )(x_ref, matrix)
                return total[...]

            total = pl.run_scoped(multiply, plgpu.ACC((rows, tile_columns)))

            def store(staged):
                staged[...] = total.astype(staged.dtype)
                plgpu.commit_smem()
                place = (pl.ds(block * rows, rows), pl.ds(tile * tile_columns, tile_columns))
                plgpu.copy_smem_to_gmem(staged, out_ref.at[place])
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(store, plgpu.SMEM((rows, tile_columns), out_ref.dtype))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((places, outer), x.dtype),
        grid=(len(groups.group) * tiles,),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(groups.group, groups.count[None], x, weights)
