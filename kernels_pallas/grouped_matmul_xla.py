# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product in plain XLA: a loop over the blocks, those without rows skipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.row_groups import RowGroups


def grouped_matmul_xla(
    x: Float[Array, "places K"], weights: Float[Array, "X K N"], groups: RowGroups
) -> Float[Array, "places N"]:
    """Each block's rows times its group's matrix; blocks without rows give zeros."""
    rows, inner, outer = groups.block_rows, *weights.shape[1:]

    def block(inputs):
        part, group, used = inputs
        empty = jnp.zeros((rows, outer), x.dtype)
        return jax.lax.cond(used, lambda: part @ weights[group], lambda: empty)

    used = jnp.arange(len(groups.group)) < groups.count
    return jax.lax.map(block, (x.reshape(-1, rows, inner), groups.group, used)).reshape(-1, outer)
