# SPDX-License-Identifier: Apache-2.0
"""Claim: window attention joins exactly the patches of a window, a packed segment of bounded length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, normal, offsets, with_padding
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import OTHER_LAYOUT

from kernels_pallas import window_xla
from kernels_pallas.reference import window_attention_reference
from kernels_pallas.window_xla import window_attention_xla

jitted = jax.jit(window_attention_xla, static_argnums=(4, 5))
reference = jax.jit(window_attention_reference, static_argnums=(4, 5))

PATCHES, CAPACITY = 40, 8
WINDOWS = offsets(8, 3, 0, 7, 1, 8, 0)  # 27 of the 40 patches


@pytest.fixture(params=["one step", "many steps"])
def attend(request, monkeypatch):
    if request.param == "many steps":
        monkeypatch.setattr(window_xla, "STEP_SCORES", 2 * 4 * CAPACITY**2)
    return jax.jit(lambda *a: window_attention_xla(*a, SCALE, CAPACITY))


def problem(heads=4, kv_heads=2, width=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((PATCHES, heads, width), (PATCHES, kv_heads, width), (PATCHES, kv_heads, width))
    return tuple(normal(rng, *shape) for shape in shapes)


def test_equals_the_reference(attend):
    expected = reference(*problem(), WINDOWS, SCALE, CAPACITY)
    np.testing.assert_allclose(attend(*problem(), WINDOWS), expected, atol=OTHER_LAYOUT)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 64), (4, 1, 72), (4, 2, 80), (6, 3, 128)])
def test_head_dims_and_groups(heads, kv_heads, width):
    inputs = problem(heads, kv_heads, width)
    expected = reference(*inputs, WINDOWS, SCALE, CAPACITY)
    np.testing.assert_allclose(jitted(*inputs, WINDOWS, SCALE, CAPACITY), expected, atol=OTHER_LAYOUT)


def test_padding_may_hold_anything_and_gives_zeros(attend):
    clean, real = problem(), WINDOWS[-1]
    out = attend(*(with_padding(x, real, np.nan) for x in clean), WINDOWS)
    np.testing.assert_array_equal(out, attend(*clean, WINDOWS))
    np.testing.assert_array_equal(out[real:], 0)


def test_padding_only():
    np.testing.assert_array_equal(jitted(*problem(), offsets(0, 0, 0), SCALE, CAPACITY), 0)


def test_gradient_equals_the_reference(attend):
    weight = normal(np.random.default_rng(2), PATCHES, 4, 8)
    ours = jax.grad(lambda *qkv: (attend(*qkv, WINDOWS) * weight).sum(), (0, 1, 2))(*problem())
    expected = jax.grad(lambda *qkv: (reference(*qkv, WINDOWS, SCALE, CAPACITY) * weight).sum(), (0, 1, 2))
    for got, want in zip(ours, expected(*problem()), strict=True):
        np.testing.assert_allclose(got, want, atol=OTHER_LAYOUT)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, CAPACITY), min_size=5, max_size=5), st.integers(0, 2**31))
def test_any_windows(lengths, seed):
    inputs, windows = problem(seed=seed), offsets(*lengths)
    expected = reference(*inputs, windows, SCALE, CAPACITY)
    np.testing.assert_allclose(jitted(*inputs, windows, SCALE, CAPACITY), expected, atol=OTHER_LAYOUT)


def test_memory_is_linear_in_the_patches():
    """Twice the patches never take more than twice the memory."""

    def temp(patches):
        tokens = jax.ShapeDtypeStruct((patches, 16, 80), jnp.float32)
        windows = jax.ShapeDtypeStruct((patches // 64 + 1,), jnp.int32)
        lowered = jax.jit(lambda *a: window_attention_xla(*a, SCALE, 64)).lower(tokens, tokens, tokens, windows)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temp(16384) < 2 * temp(8192)


def test_lowers_for_cuda():
    tokens, windows = jax.ShapeDtypeStruct((2048, 16, 80), jnp.bfloat16), jax.ShapeDtypeStruct((37,), jnp.int32)
    traced = jax.jit(lambda *a: window_attention_xla(*a, SCALE, 64)).trace(tokens, tokens, tokens, windows)
    assert "stablehlo.dot_general" in traced.lower(lowering_platforms=("cuda",)).as_text()
