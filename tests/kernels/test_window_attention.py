# SPDX-License-Identifier: Apache-2.0
"""Claim: window attention joins exactly the patches of a table row, wherever they lie, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, normal, window_table
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import OTHER_LAYOUT

from kernels_pallas import window_xla
from kernels_pallas.reference import window_attention_reference
from kernels_pallas.window_xla import window_attention_xla

jitted = jax.jit(window_attention_xla, static_argnums=4)
reference = jax.jit(window_attention_reference, static_argnums=4)

PATCHES, CAPACITY = 40, 8
COUNTS = [8, 3, 0, 7, 1, 8, 0]  # 27 of the 40 patches


@pytest.fixture(params=["one step", "many steps"])
def attend(request, monkeypatch):
    if request.param == "many steps":
        monkeypatch.setattr(window_xla, "STEP_SCORES", 2 * 4 * CAPACITY**2)
    return jax.jit(lambda q, k, v, table: window_attention_xla(q, k, v, table, SCALE))


def problem(heads=4, kv_heads=2, width=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((PATCHES, heads, width), (PATCHES, kv_heads, width), (PATCHES, kv_heads, width))
    return tuple(normal(rng, *shape) for shape in shapes)


def test_equals_the_reference(attend):
    table = window_table(np.random.default_rng(1), PATCHES, COUNTS, CAPACITY)
    expected = reference(*problem(), table, SCALE)
    np.testing.assert_allclose(attend(*problem(), table), expected, atol=OTHER_LAYOUT)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 64), (4, 1, 72), (4, 2, 80), (6, 3, 128)])
def test_head_dims_and_groups(heads, kv_heads, width):
    table = window_table(np.random.default_rng(1), PATCHES, COUNTS, CAPACITY)
    inputs = problem(heads, kv_heads, width)
    expected = reference(*inputs, table, SCALE)
    np.testing.assert_allclose(jitted(*inputs, table, SCALE), expected, atol=OTHER_LAYOUT)


def test_patches_in_no_window_may_hold_anything_and_give_zeros(attend):
    table = window_table(np.random.default_rng(1), PATCHES, COUNTS, CAPACITY)
    outside = np.setdiff1d(np.arange(PATCHES), table)
    clean = problem()
    dirty = tuple(x.copy() for x in clean)
    for x in dirty:
        x[outside] = np.nan
    out = attend(*dirty, table)
    np.testing.assert_array_equal(out, attend(*clean, table))
    np.testing.assert_array_equal(out[outside], 0)


def test_holes_only():
    out = jitted(*problem(), np.full((3, CAPACITY), PATCHES, np.int32), SCALE)
    np.testing.assert_array_equal(out, 0)


def test_gradient_equals_the_reference(attend):
    table = window_table(np.random.default_rng(1), PATCHES, COUNTS, CAPACITY)
    weight = normal(np.random.default_rng(2), PATCHES, 4, 8)
    ours = jax.grad(lambda *qkv: (attend(*qkv, table) * weight).sum(), (0, 1, 2))(*problem())
    expected = jax.grad(lambda *qkv: (reference(*qkv, table, SCALE) * weight).sum(), (0, 1, 2))
    for got, want in zip(ours, expected(*problem()), strict=True):
        np.testing.assert_allclose(got, want, atol=OTHER_LAYOUT)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, CAPACITY), min_size=5, max_size=5), st.integers(0, 2**31))
def test_any_table(counts, seed):
    table = window_table(np.random.default_rng(seed), PATCHES, counts, CAPACITY)
    inputs = problem(seed=seed)
    np.testing.assert_allclose(jitted(*inputs, table, SCALE), reference(*inputs, table, SCALE), atol=OTHER_LAYOUT)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (6, 10), (2, 2), (16, 18)])
def test_tables_list_patches_first_and_holes_last(height, width):
    """What cuDNN's masks by length rely on."""
    from mmjax.models.images.packing import window_table as qwen_table

    hole = qwen_table(height, width, 2, 4) < 0
    assert (np.diff(hole.astype(int), axis=1) >= 0).all()


def test_memory_is_linear_in_the_patches():
    """Twice the patches never take more than twice the memory."""

    def temp(patches):
        tokens = jax.ShapeDtypeStruct((patches, 16, 80), jnp.float32)
        table = jax.ShapeDtypeStruct((patches // 64, 64), jnp.int32)
        compiled = jax.jit(lambda *a: window_attention_xla(*a, SCALE)).lower(tokens, tokens, tokens, table).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(16384) < 2 * temp(8192)


def test_lowers_for_cuda():
    tokens, table = jax.ShapeDtypeStruct((2048, 16, 80), jnp.bfloat16), jax.ShapeDtypeStruct((36, 64), jnp.int32)
    traced = jax.jit(lambda *a: window_attention_xla(*a, SCALE)).trace(tokens, tokens, tokens, table)
    assert "stablehlo.dot_general" in traced.lower(lowering_platforms=("cuda",)).as_text()
