# SPDX-License-Identifier: Apache-2.0
"""The two pieces of the packed attention kernel that Pallas cannot run without a GPU, in plain operations."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def weigh(values, weights, v_smem):
    """`values` and the product of `weights`, which a GPU takes from registers, with the block of values."""
    block = v_smem[...].astype(jnp.float32)
    plgpu.commit_smem()  # on a GPU it is the matrix unit that reads the block, and no copy overtakes it
    return values + jnp.dot(weights.astype(jnp.float32), block)


def store_some(rows, out, first, start, end, head):
    """Writes those of `rows` that lie in [start, end)."""
    for i in range(rows.shape[0]):

        @pl.when((first + i >= start) & (first + i < end))
        def _(i=i):
            out[first + i, head, :] = rows[i]
