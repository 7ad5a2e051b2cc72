# SPDX-License-Identifier: Apache-2.0
"""Parts that the Qwen vision towers share: bytes to pixels, attention with rotary positions, the merger's MLP."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import gelu, linear
from mmjax.layers.rope import apply_rotary
from mmjax.models.vision_inputs import VisionInputs


def pixels(
    inputs: VisionInputs, table: Float[Array, "C 256"], temporal: int, patch_size: int, dtype: jnp.dtype
) -> Float[Array, "P values"]:
    """Normalised pixel values: a look-up of every byte in its channel's row of the table. Padding gives zeros."""
    channels = table.shape[0]
    channel_of_value = jnp.arange(channels, dtype=jnp.int32).repeat(temporal * patch_size**2)
    entry = inputs.patches.astype(jnp.int32) + 256 * channel_of_value
    values = jnp.asarray(table, dtype).reshape(-1).at[entry].get(mode="promise_in_bounds")
    is_real = jnp.arange(len(entry)) < inputs.num_patches
    return jnp.where(is_real[:, None], values, 0)


def attention(
    x: Float[Array, "P E"],
    qkv: Float[Array, "three_E E"],
    qkv_bias: Float[Array, "three_E"],
    cos: Float[Array, "P half_D"],
    sin: Float[Array, "P half_D"],
    num_heads: int,
    attend: Any,
) -> Float[Array, "P E"]:
    """Bidirectional attention up to its output projection; `attend(q, k, v, scale)` knows who sees whom."""
    patches, width = x.shape
    dim = width // num_heads
    q, k, v = jnp.moveaxis(linear(x, qkv, qkv_bias).reshape(patches, 3, num_heads, dim), 1, 0)
    # The tables are float32, so the rotation is too.
    out = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, dim**-0.5)
    return out.reshape(patches, width)


def merge_rows(normed: Float[Array, "P E"], merger: dict, merge: int) -> Float[Array, "R out"]:
    """Joins the merge**2 patches of each block and maps them to one embedding row."""
    joined = normed.reshape(len(normed) // merge**2, -1)
    return linear(gelu(linear(joined, merger["fc1"], merger["fc1_bias"])), merger["fc2"], merger["fc2_bias"])
