# SPDX-License-Identifier: Apache-2.0
"""Claim: the references that judge the other implementations equal attention written out segment by segment."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from attention_kit import SCALE, normal, offsets, plain_attention, with_padding
from tolerances import OTHER_LAYOUT

from kernels_pallas.dispatch import reference_attention, reference_vision_ops


def problem(tokens, real):
    rng = np.random.default_rng(0)
    return tuple(with_padding(normal(rng, tokens, count, 8), real, np.nan) for count in (4, 2, 2))


@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal):
    q, k, v = problem(30, 21)
    out = jax.jit(lambda *a: reference_vision_ops().packed(*a, SCALE, causal))(q, k, v, offsets(12, 0, 9))
    for segment in (slice(0, 12), slice(12, 21)):
        expected = plain_attention(q[segment], k[segment], v[segment], causal)
        np.testing.assert_allclose(out[segment], expected, atol=OTHER_LAYOUT)
    np.testing.assert_array_equal(out[21:], 0)


def test_windows():
    q, k, v = problem(30, 13)
    out = np.asarray(jax.jit(lambda *a: reference_vision_ops().windowed(*a, SCALE, 8))(q, k, v, offsets(8, 5, 0)))
    for own in (slice(0, 8), slice(8, 13)):
        np.testing.assert_allclose(out[own], plain_attention(q[own], k[own], v[own]), atol=OTHER_LAYOUT)
    np.testing.assert_array_equal(out[13:], 0)


def test_text_is_causal_and_the_pages_pass_through():
    q, k, v = problem(9, 9)
    out, kv = jax.jit(lambda *a: reference_attention()(*a, (), None, SCALE))(q, k, v)
    assert kv == ()
    np.testing.assert_allclose(out, plain_attention(q, k, v, causal=True), atol=OTHER_LAYOUT)
