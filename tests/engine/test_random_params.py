# SPDX-License-Identifier: Apache-2.0
"""Claim: random parameters fit the tree, repeat by seed, and leave nothing at 0 or 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.models.random_params import random_params


def test_leaves_fit_repeat_and_vary():
    leaf = jax.ShapeDtypeStruct
    spec = {
        "layers": [{"o": leaf((64, 256), jnp.bfloat16)}, {"o": leaf((64, 256), jnp.bfloat16)}],
        "vectors": {"norm1": leaf((2, 64), jnp.float32), "norm1_bias": leaf((2, 64), jnp.float32)},
        "norm": leaf((64,), jnp.float32),
    }
    params = random_params(spec, seed=3)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), spec)
    jax.tree.map(np.testing.assert_array_equal, params, random_params(spec, seed=3))
    first, second = (np.asarray(layer["o"], np.float32) for layer in params["layers"])
    assert not np.array_equal(first, second)
    assert abs(first.std() - 256**-0.5) < 0.005
    assert abs(params["vectors"]["norm1"].mean() - 1) < 0.05
    assert abs(params["norm"].mean() - 1) < 0.05
    assert abs(params["vectors"]["norm1_bias"].mean()) < 0.05
    assert all(np.std(np.asarray(x, np.float32)) > 0.01 for x in jax.tree.leaves(params))
