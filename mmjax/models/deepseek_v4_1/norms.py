# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as DeepSeek-V4 computes it: the weight is float32 and multiplies before the result is rounded."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def unweighted_rms_norm(x: Float[Array, "*dims E"], eps: float) -> Float[Array, "*dims E"]:
    """x / sqrt(mean(x^2) + eps), in float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)


def wide_rms_norm(x: Float[Array, "*dims E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "*dims E"]:
    """weight * x / sqrt(mean(x^2) + eps) in float32, returned in x's dtype."""
    return (weight * unweighted_rms_norm(x, eps)).astype(x.dtype)
