# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: angles in float32, several position axes, pairs made of the two halves of a head."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_tables(
    positions: Int[Array, "A T"], axis_of_pair: Int[Array, "half_D"], frequency_of_pair: Float[Array, "half_D"]
) -> tuple[Float[Array, "T half_D"], Float[Array, "T half_D"]]:
    """Cosine and sine of each rotary pair's angle, float32.

    Args:
      positions: one row a position axis.
      axis_of_pair: the axis whose position turns the pair.
      frequency_of_pair: float32, radians per position.
    """
    angles = positions.astype(jnp.float32)[axis_of_pair].T * frequency_of_pair
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "T N D"], cos: Float[Array, "T half_D"], sin: Float[Array, "T half_D"]
) -> Float[Array, "T N D"]:
    """Turns pair i = (x[i], x[i + D/2]) of every head. Computed in the dtype of the tables, returned in x's."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
