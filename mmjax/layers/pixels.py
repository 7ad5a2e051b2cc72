# SPDX-License-Identifier: Apache-2.0
"""The entry of every vision tower: bytes to normalised values."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8


def pixel_values(
    patches: UInt8[Array, "P values"], num_patches: Int[Array, ""], table: Float[Array, "C 256"], dtype: jnp.dtype
) -> Float[Array, "P values"]:
    """A look-up of every byte in its channel's row of the table; patches lie channel by channel. Padding gives zeros.

    Args:
      num_patches: how many are real; the others may hold anything.
      table: the normalised value of every byte, per channel.
    """
    channels, values = table.shape[0], patches.shape[1]
    channel_of_value = jnp.arange(channels, dtype=jnp.int32).repeat(values // channels)
    entry = patches.astype(jnp.int32) + 256 * channel_of_value
    looked_up = jnp.asarray(table, dtype).reshape(-1).at[entry].get(mode="promise_in_bounds")
    is_real = jnp.arange(len(entry)) < num_patches
    return jnp.where(is_real[:, None], looked_up, 0)
