# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of the DeepSeek-V4 decoder: neighbouring values make a pair, and the last values of a head turn."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope_tables(
    positions: Int[Array, "T"], frequencies: Float[Array, "pairs"], dtype: jnp.dtype
) -> tuple[Float[Array, "T pairs"], Float[Array, "T pairs"]]:
    """Cosine and sine of each pair's angle, computed in float32 and rounded to the model's dtype."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def turn(
    x: Float[Array, "T *heads D"], cos: Float[Array, "T pairs"], sin: Float[Array, "T pairs"]
) -> Float[Array, "T *heads D"]:
    """Turns the last 2 * pairs values of every head, in float32. A negative sine turns back."""
    pairs = cos.shape[-1]
    still, moving = jnp.split(x, (x.shape[-1] - 2 * pairs,), axis=-1)
    shape = (len(x), *(1,) * (x.ndim - 2), pairs)
    cos, sin = cos.reshape(shape).astype(jnp.float32), sin.reshape(shape).astype(jnp.float32)
    first, second = jnp.moveaxis(moving.astype(jnp.float32).reshape(*moving.shape[:-1], pairs, 2), -1, 0)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([still, turned.reshape(moving.shape).astype(x.dtype)], axis=-1)
