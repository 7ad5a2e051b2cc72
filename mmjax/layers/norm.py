# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last axis, in float32 whatever the input's dtype."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*dims E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "*dims E"]:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype before the weight is applied (as in LLaMA)."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*dims E"], weight: Float[Array, "E"], bias: Float[Array, "E"], eps: float
) -> Float[Array, "*dims E"]:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded once at the end."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
