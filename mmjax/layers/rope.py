# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: angles in float32, several position axes, pairs made of the two halves of a head."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def inverse_frequencies(dim: int, theta: float) -> np.ndarray:
    """float32 [dim / 2]: theta^(-2i/dim), with the exponent and the reciprocal rounded to float32 as PyTorch does."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1.0) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


def rotary_tables(
    positions: Int[Array, "A T"], axis_of_pair: np.ndarray, frequency_of_pair: np.ndarray
) -> tuple[Float[Array, "T half_D"], Float[Array, "T half_D"]]:
    """Cosine and sine of each rotary pair's angle, float32.

    Args:
      positions: one row a position axis.
      axis_of_pair: int [D / 2], the axis whose position turns the pair.
      frequency_of_pair: float32 [D / 2], radians per position.
    """
    angles = positions.astype(jnp.float32)[axis_of_pair].T * frequency_of_pair
    return jnp.cos(angles), jnp.sin(angles)


def text_rotary_tables(
    positions: Int[Array, "A T"], head_dim: int, theta: float, sections: tuple[int, ...]
) -> tuple[Float[Array, "T half_D"], Float[Array, "T half_D"]]:
    """Tables of a text decoder; `sections` says how many pairs follow each axis, one block after the other."""
    axis_of_pair = np.repeat(np.arange(len(sections)), sections)
    return rotary_tables(positions, axis_of_pair, inverse_frequencies(head_dim, theta))


def axial_rotary_tables(
    positions: Int[Array, "P 2"], head_dim: int, theta: float
) -> tuple[Float[Array, "P half_D"], Float[Array, "P half_D"]]:
    """Tables of a vision tower: the first half of the pairs turns with the row, the second with the column."""
    per_axis = inverse_frequencies(head_dim // 2, theta)
    axis_of_pair = np.repeat(np.arange(2), len(per_axis))
    return rotary_tables(positions.T, axis_of_pair, np.tile(per_axis, 2))


def apply_rotary(
    x: Float[Array, "T N D"], cos: Float[Array, "T half_D"], sin: Float[Array, "T half_D"]
) -> Float[Array, "T N D"]:
    """Turns pair i = (x[i], x[i + D/2]) of every head. Computed in the dtype of the tables, returned in x's."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
