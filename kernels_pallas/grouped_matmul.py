# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product: each row times the matrix of its group. One door, the implementation chosen behind it."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from kernels_pallas.grouped_matmul_mosaic import STEP_DEPTH, TILE_COLUMNS, grouped_matmul_mosaic
from kernels_pallas.grouped_matmul_xla import grouped_matmul_xla
from kernels_pallas.row_groups import RowGroups, row_groups, spread

__all__ = ["RowGroups", "group_rows", "grouped_matmul", "spread"]

# Hopper's matrix instructions, which the next generation dropped.
FIRST_CAPABILITY, END_CAPABILITY = (9, 0), (10, 0)


@cache
def cuda_capability() -> tuple[int, int]:
    """Compute capability of the first CUDA device, (0, 0) where there is none."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return 0, 0
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def choose(capability: tuple[int, int], dtype: DTypeLike, inner: int, outer: int) -> str:
    """ "mosaic" or "xla": what a CUDA device of this capability runs for matrices [inner, outer] of this dtype."""
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    fits = half and inner % STEP_DEPTH == 0 and outer % TILE_COLUMNS == 0
    return "mosaic" if fits and FIRST_CAPABILITY <= capability < END_CAPABILITY else "xla"


def group_rows(group_of_row: Int[Array, " R"], groups: int) -> RowGroups:
    """The layout that `grouped_matmul` wants, with blocks that suit the number of rows a group has on average."""
    mean = len(group_of_row) / groups
    if FIRST_CAPABILITY <= cuda_capability() < END_CAPABILITY:
        return row_groups(group_of_row, groups, 128 if mean > 64 else 64)
    return row_groups(group_of_row, groups, next((rows for rows in (8, 16, 32, 64) if mean <= rows), 128))


def grouped_matmul(
    x: Float[Array, "places K"], weights: Float[Array, "X K N"], groups: RowGroups
) -> Float[Array, "places N"]:
    """Rows at the places of `groups` times their group's matrix; what no row lies at is undefined.

    A row's result depends on that row and its group's matrix alone, whatever the others hold.
    """
    if choose(cuda_capability(), x.dtype, *weights.shape[1:]) == "xla":
        return grouped_matmul_xla(x, weights, groups)
    return lax.platform_dependent(x, weights, groups, cuda=grouped_matmul_mosaic, default=grouped_matmul_xla)
