# SPDX-License-Identifier: Apache-2.0
"""Random parameters of a family's shapes, for benchmarks and tests: every leaf is drawn, none is 0 or 1 throughout."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.jit, static_argnums=0)
def _draw(leaf: jax.ShapeDtypeStruct, key: jax.Array, number: int, scale: float, offset: float) -> jax.Array:
    """Compiled once a shape: all else is an argument."""
    drawn = jax.random.normal(jax.random.fold_in(key, number), leaf.shape, leaf.dtype)
    return drawn * scale + offset


def random_params(spec: dict, seed: int) -> dict:
    """A parameter tree shaped like `spec`: matrices scaled by 1/sqrt(inputs), norm weights near 1, the rest near 0.

    Tables of integers, whose values have a meaning, are 0.

    Leaves are drawn one at a time, so that the peak memory is the tree's own size and one leaf.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(spec)
    key = jax.random.key(seed, impl="rbg")  # the device's own generator: quick to compile and to run
    drawn = []
    for i, (path, leaf) in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            drawn.append(jnp.zeros(leaf.shape, leaf.dtype))
            continue
        # Vectors of all layers are stacked to rank 2; their names tell them from matrices.
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        is_vector = leaf.ndim < 2 or "vectors" in names
        is_weight_of_norm = is_vector and "norm" in names[-1] and not names[-1].endswith("bias")
        scale = 0.1 if is_vector else leaf.shape[-1] ** -0.5
        drawn.append(_draw(leaf, key, i, scale, 1.0 if is_weight_of_norm else 0.0))
    return jax.tree_util.tree_unflatten(structure, drawn)
