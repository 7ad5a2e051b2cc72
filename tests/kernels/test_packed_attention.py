# SPDX-License-Identifier: Apache-2.0
"""Claim: packed attention stays inside its segments, equals dense masks, ignores padding and needs linear memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, normal, offsets, with_padding
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import OTHER_LAYOUT, ROUNDING

from kernels_pallas import packed_xla
from kernels_pallas.packed_xla import packed_attention_xla
from kernels_pallas.reference import packed_attention_reference

jitted = jax.jit(packed_attention_xla, static_argnums=(4, 5))
reference = jax.jit(packed_attention_reference, static_argnums=(4, 5))

TOKENS = 200  # four blocks when blocks are small, the last one moved back to end at the last token


@pytest.fixture(params=["one block", "many blocks"])
def attend(request, monkeypatch):
    """A fresh jitted function of (q, k, v, cu_seqlens, causal)."""
    if request.param == "many blocks":
        monkeypatch.setattr(packed_xla, "BLOCK_SCORES", 1)
    return jax.jit(lambda q, k, v, cu, causal: packed_attention_xla(q, k, v, cu, SCALE, causal), static_argnums=4)


def problem(tokens=TOKENS, heads=4, kv_heads=2, width=8, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(normal(rng, tokens, count, width) for count in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [(200,), (64, 64, 64), (1, 0, 98, 0, 37), (0, 0, 0), (130, 70), (3,) * 50],
    ids=lambda lengths: "-".join(map(str, lengths[:5])),
)
def test_equals_the_reference(attend, lengths, causal):
    q, k, v = problem()
    cu = offsets(*lengths)
    expected = reference(q, k, v, cu, SCALE, causal)
    np.testing.assert_allclose(attend(q, k, v, cu, causal), expected, atol=OTHER_LAYOUT)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 64), (4, 1, 72), (4, 2, 80), (6, 3, 128)])
def test_head_dims_and_groups(heads, kv_heads, width):
    q, k, v = problem(24, heads, kv_heads, width)
    cu = offsets(5, 12, 0)
    expected = reference(q, k, v, cu, SCALE)
    np.testing.assert_allclose(jitted(q, k, v, cu, SCALE), expected, atol=OTHER_LAYOUT)


def test_one_token():
    q, k, v = problem(1)
    np.testing.assert_allclose(jitted(q, k, v, offsets(1), SCALE), np.repeat(v, 2, 1), atol=ROUNDING)


@pytest.mark.parametrize("filler", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("real", [0, 1, 130])
def test_padding_may_hold_anything(attend, real, causal, filler):
    cu = offsets(real // 2, real - real // 2, 0)
    clean = attend(*(with_padding(x, real, 0.0) for x in problem()), cu, causal)
    dirty = attend(*(with_padding(x, real, filler) for x in problem()), cu, causal)
    np.testing.assert_array_equal(dirty, clean)
    np.testing.assert_array_equal(dirty[real:], 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(200,), (70, 0, 100)], ids=str)
def test_gradient_equals_the_reference(monkeypatch, lengths, causal):
    monkeypatch.setattr(packed_xla, "BLOCK_SCORES", 1)
    cu = offsets(*lengths)
    inputs = tuple(with_padding(x, int(cu[-1]), np.nan) for x in problem())
    weight = normal(np.random.default_rng(1), *inputs[0].shape)

    def gradient(attend, inputs):
        loss = jax.jit(lambda q, k, v: (attend(q, k, v, cu, SCALE, causal) * weight).sum())
        return jax.grad(loss, (0, 1, 2))(*inputs)

    ours = gradient(lambda *a: packed_attention_xla(*a), inputs)
    expected = gradient(packed_attention_reference, tuple(np.nan_to_num(x) for x in inputs))
    for got, want in zip(ours, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=OTHER_LAYOUT)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 24), min_size=4, max_size=4), st.integers(0, 2**31))
def test_any_segments(lengths, seed):
    q, k, v = problem(96, 2, 1, 8, seed)
    cu = offsets(*lengths)
    np.testing.assert_allclose(jitted(q, k, v, cu, SCALE), reference(q, k, v, cu, SCALE), atol=OTHER_LAYOUT)


def test_bfloat16_sums_in_float32():
    """With equal weights the output is a mean of 4096 ones, which a bfloat16 sum could not reach."""
    q = jnp.zeros((4096, 1, 8), jnp.bfloat16)
    out = jitted(q, q, jnp.ones_like(q), offsets(4096), SCALE)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 1)


def test_memory_is_linear_in_the_tokens():
    """16384 patches, 16 heads of 80: arrays of 80 MiB, where one score matrix of one head would take 1 GiB."""
    tokens = jax.ShapeDtypeStruct((16384, 16, 80), jnp.float32)
    cu = jax.ShapeDtypeStruct((9,), jnp.int32)

    def forward(q, k, v, cu):
        return packed_attention_xla(q, k, v, cu, SCALE)

    def backward(q, k, v, cu):
        return jax.grad(lambda *qkv: forward(*qkv, cu).sum(), (0, 1, 2))(q, k, v)

    def temp(function):
        return jax.jit(function).lower(tokens, tokens, tokens, cu).compile().memory_analysis().temp_size_in_bytes

    # Compilers may keep copies in another layout (one of 80 MiB on a GPU), never anything quadratic.
    assert temp(forward) < (32 << 20 if jax.default_backend() == "cpu" else 2 * (80 << 20))
    assert temp(backward) < 3 * (80 << 20)


def test_lowers_for_cuda():
    tokens = jax.ShapeDtypeStruct((2048, 16, 80), jnp.bfloat16)
    traced = jax.jit(lambda *a: packed_attention_xla(*a, SCALE)).trace(
        tokens, tokens, tokens, jax.ShapeDtypeStruct((5,), jnp.int32)
    )
    assert "stablehlo.while" in traced.lower(lowering_platforms=("cuda",)).as_text()
