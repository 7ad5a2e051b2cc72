# SPDX-License-Identifier: Apache-2.0
"""Attention within a vision tower: queries, keys and values from one matrix, rotary positions, no causal mask."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import linear
from mmjax.layers.rope import apply_rotary


def tower_attention(
    x: Float[Array, "P E"],
    qkv: Float[Array, "three_E E"],
    qkv_bias: Float[Array, "three_E"] | None,
    cos: Float[Array, "P half_D"],
    sin: Float[Array, "P half_D"],
    num_heads: int,
    attend: Callable[..., Float[Array, "P N D"]],
    segments: Array,
) -> Float[Array, "P E"]:
    """Bidirectional attention up to its output projection.

    Args:
      cos, sin: the rotation is computed in their dtype.
      attend: (q, k, v [P, N, D], segments, scale) -> [P, N, D].
      segments: who sees whom, in the form that `attend` takes.
    """
    patches, width = x.shape
    dim = width // num_heads
    # Slices of the joint product: rotary positions read queries and keys where they lie, a transpose would move them.
    q, k, v = jnp.split(linear(x, qkv, qkv_bias).reshape(patches, 3 * num_heads, dim), 3, axis=1)
    out = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, segments, dim**-0.5)
    return out.reshape(patches, width)
