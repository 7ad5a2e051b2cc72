# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product as a Hopper kernel for few rows a group: thread blocks that each make one tile.

What counts there is to read every matrix once, at the memory's speed.
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

# Columns of a tile, how much of the inner dimension a step loads, and steps in flight: two thread blocks then fit the
# shared memory of a multiprocessor, so that one loads while the other begins or ends.
COLUMNS, DEPTH, STEPS = 128, 64, 3


def grouped_matmul_tiles(
    x: Float[Array, "places K"], weights: Float[Array, "X K N"], groups: RowGroups, *, interpret: Any = None
) -> Float[Array, "places N"]:
    """Each block's rows times its group's matrix; blocks without rows come back undefined.

    Half precision, 64 or 128 rows a block, `K` a multiple of `DEPTH` and `N` of `COLUMNS`.
    """
    (places, inner), outer, rows = x.shape, weights.shape[2], groups.block_rows
    tiles = outer // COLUMNS

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
                    grid=(inner // DEPTH,),
                    in_specs=[
                        plgpu.BlockSpec((rows, DEPTH), lambda step: (block, step), delay_release=1),
                        plgpu.BlockSpec((DEPTH, COLUMNS), lambda step: (step, tile), delay_release=1),
                    ],
                    max_concurrent_steps=STEPS,
                )(x_ref, matrix)
                return total[...]

            total = pl.run_scoped(multiply, plgpu.ACC((rows, COLUMNS)))

            def store(staged):
                staged[...] = total.astype(staged.dtype)
                plgpu.commit_smem()
                place = (pl.ds(block * rows, rows), pl.ds(tile * COLUMNS, COLUMNS))
                plgpu.copy_smem_to_gmem(staged, out_ref.at[place])
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(store, plgpu.SMEM((rows, COLUMNS), out_ref.dtype))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((places, outer), x.dtype),
        grid=(len(groups.group) * tiles,),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(groups.group, groups.count[None], x, weights)
