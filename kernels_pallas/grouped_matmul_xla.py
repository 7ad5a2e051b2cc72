# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product in plain XLA: a loop over the blocks that hold rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.row_groups import RowGroups


def grouped_matmul_xla(
    x: Float[Array, "places K"], weights: Float[Array, "X K N"], groups: RowGroups
) -> Float[Array, "places N"]:
    """Each block's rows times its group's matrix; blocks without rows give zeros."""
    rows = groups.block_rows

    def block(index, out):
        part = jax.lax.dynamic_slice_in_dim(x, index * rows, rows) @ weights[groups.group[index]]
        return jax.lax.dynamic_update_slice_in_dim(out, part, index * rows, 0)

    return jax.lax.fori_loop(0, groups.count, block, jnp.zeros((len(x), weights.shape[2]), x.dtype))
