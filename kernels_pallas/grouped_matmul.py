# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product: each row times the matrix of its group. One door, the implementation chosen behind it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from kernels_pallas import mosaic
from kernels_pallas.grouped_matmul_xla import grouped_matmul_xla
from kernels_pallas.row_groups import RowGroups, row_groups, spread

__all__ = ["RowGroups", "group_rows", "grouped_gated_matmul", "grouped_matmul", "spread"]

# Rows of a block where groups are small and matrices are what must be read, and where groups are large.
FEW_ROWS, MANY_ROWS = 64, 128
# Multiples that the kernels' tiles need of a matrix' inner and outer dimension.
INNER, OUTER = 64, 256


@cache
def on_hopper() -> bool:
    """Whether the first CUDA device, if there is one, can run the kernels."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return False
    major, minor = device.compute_capability.split(".")
    return mosaic.available((int(major), int(minor)))


def choose(hopper: bool, dtype: DTypeLike, inner: int, outer: int, block_rows: int) -> str:
    """What a CUDA device runs for matrices [inner, outer]: "xla", or the kernel "tiles" or "persistent"."""
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if not (hopper and half and inner % INNER == 0 and outer % OUTER == 0):
        return "xla"
    return "persistent" if block_rows == MANY_ROWS else "tiles"


def group_rows(group_of_row: Int[Array, " R"], groups: int) -> RowGroups:
    """The layout that the products want, with blocks that suit the number of rows a group has on average."""
    mean = len(group_of_row) / groups
    if on_hopper():
        return row_groups(group_of_row, groups, FEW_ROWS if mean < MANY_ROWS else MANY_ROWS)
    return row_groups(group_of_row, groups, next((rows for rows in (8, 16, 32, 64) if mean <= rows), MANY_ROWS))


def grouped_matmul(
    x: Float[Array, "places K"], weights: Float[Array, "X K N"], groups: RowGroups
) -> Float[Array, "places N"]:
    """Rows at the places of `groups` times their group's matrix; what no row lies at is undefined.

    A row's result depends on that row and its group's matrix alone, whatever the others hold.
    """
    return _run(x, weights, groups, {"xla": grouped_matmul_xla, "tiles": _tiles, "persistent": _persistent})


def grouped_gated_matmul(
    x: Float[Array, "places K"], weights: Float[Array, "X K two_N"], groups: RowGroups
) -> Float[Array, "places N"]:
    """silu(gate) * up of the product that `grouped_matmul` gives, gate before up along its columns."""
    return _run(
        x,
        weights,
        groups,
        {
            "xla": lambda *inputs: _gate(grouped_matmul_xla(*inputs)),
            "tiles": lambda *inputs: _gate(_tiles(*inputs)),
            "persistent": lambda *inputs: _persistent(*inputs, gated=True),
        },
    )


def _run(x: Array, weights: Array, groups: RowGroups, implementations: dict[str, Callable]) -> Array:
    """The implementation of the platform that the computation is lowered for."""
    chosen = choose(on_hopper(), x.dtype, *weights.shape[1:], groups.block_rows)
    if chosen == "xla":
        return implementations["xla"](x, weights, groups)
    return lax.platform_dependent(x, weights, groups, cuda=implementations[chosen], default=implementations["xla"])


def _gate(product: Float[Array, "places two_N"]) -> Float[Array, "places N"]:
    gate, up = jnp.split(product, 2, axis=-1)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(gate.dtype) * up


def _tiles(*inputs: Array) -> Array:
    from kernels_pallas.grouped_matmul_tiles import grouped_matmul_tiles

    return grouped_matmul_tiles(*inputs)


def _persistent(*inputs: Array, gated: bool = False) -> Array:
    from kernels_pallas.grouped_matmul_persistent import grouped_matmul_persistent

    return grouped_matmul_persistent(*inputs, gated=gated)
