# SPDX-License-Identifier: Apache-2.0
"""Claim: over pages, every token sees its own sequence up to itself, and only that, at the cost of its real length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, Sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import OTHER_LAYOUT

from kernels_pallas import paged_xla
from kernels_pallas.dispatch import PagedDecode, PagedPrefill
from kernels_pallas.paged_kv import write_kv
from kernels_pallas.paged_xla import paged_decode_xla, paged_prefill_xla

prefill = jax.jit(lambda q, k, v, pool, meta: paged_prefill_xla(q, k, v, pool, meta, SCALE))
decode = jax.jit(lambda q, k, v, pool, meta: paged_decode_xla(q, k, v, pool, meta, SCALE))


@pytest.fixture(params=["one tile", "many tiles"])
def run_prefill(request, monkeypatch):
    """A fresh jitted prefill; with many tiles, chunks span several and each step reads one page."""
    if request.param == "many tiles":
        monkeypatch.setattr(paged_xla, "TILE_ROWS", 4)
        monkeypatch.setattr(paged_xla, "STEP_TOKENS", 1)
    return jax.jit(lambda q, k, v, pool, meta: paged_prefill_xla(q, k, v, pool, meta, SCALE))


def check_prefill(run, sequences: Sequences, prefixes, chunks, tokens):
    out, pool = run(*sequences.prefill(prefixes, chunks, tokens))
    first = 0
    for s, (prefix, chunk) in enumerate(zip(prefixes, chunks, strict=True)):
        expected = sequences.expected(s, prefix, prefix + chunk)
        np.testing.assert_allclose(out[first : first + chunk], expected, atol=OTHER_LAYOUT)
        first += chunk
    np.testing.assert_array_equal(out[first:], 0)
    stored = [prefix + chunk for prefix, chunk in zip(prefixes, chunks, strict=True)]
    np.testing.assert_array_equal(pool, sequences.pool(stored))


@pytest.mark.parametrize(
    ("prefixes", "chunks"),
    [
        ([0], [24]),
        ([0], [1]),
        ([9], [1]),
        ([5, 0, 13, 0], [6, 9, 0, 1]),
        ([0, 0, 0], [0, 0, 0]),
        ([31, 3], [1, 17]),
        ([0, 4, 8], [4, 8, 12]),
    ],
    ids=str,
)
def test_prefill_equals_dense_masks(run_prefill, prefixes, chunks):
    lengths = [prefix + chunk for prefix, chunk in zip(prefixes, chunks, strict=True)]
    check_prefill(run_prefill, Sequences(lengths, filler=np.nan), prefixes, chunks, 24)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 64), (4, 1, 72), (4, 2, 80), (6, 3, 128)])
def test_head_dims_and_groups(heads, kv_heads, width):
    sequences = Sequences([9, 6], heads, kv_heads, width)
    check_prefill(prefill, sequences, [4, 0], [5, 6], 11)
    out, _ = decode(*sequences.decode())
    for s, length in enumerate(sequences.lengths):
        np.testing.assert_allclose(out[s : s + 1], sequences.expected(s, length - 1, length), atol=OTHER_LAYOUT)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 24), st.integers(0, 8)), min_size=3, max_size=3), st.integers(0, 2**31))
def test_any_prefill(sizes, seed):
    prefixes, chunks = (list(x) for x in zip(*sizes, strict=True))
    sequences = Sequences([p + c for p, c in sizes], filler=np.nan, seed=seed)
    check_prefill(prefill, sequences, prefixes, chunks, 24)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 32), min_size=4, max_size=4), st.integers(0, 2**31))
def test_any_decode(lengths, seed):
    sequences = Sequences(lengths, filler=np.nan, seed=seed)
    out, pool = decode(*sequences.decode())
    for s, length in enumerate(lengths):
        expected = sequences.expected(s, length - 1, length) if length else np.zeros((1, 4, 8))
        np.testing.assert_allclose(out[s : s + 1], expected, atol=OTHER_LAYOUT)
    np.testing.assert_array_equal(pool, sequences.pool(lengths))


def test_chunks_add_up_to_the_whole():
    sequences = Sequences([24])
    q, k, v, pool, meta = sequences.prefill([0], [24], 24)
    whole, _ = prefill(q, k, v, pool, meta)
    parts = []
    for first in range(0, 24, 8):
        q, k, v, _, meta = sequences.prefill([first], [8], 8)
        out, pool = prefill(q, k, v, pool, meta)
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=OTHER_LAYOUT)


@pytest.mark.parametrize("filler", [np.nan, np.inf])
def test_real_rows_are_bit_equal_whatever_the_rest_holds(run_prefill, filler):
    def both(filler):
        sequences = Sequences([11, 9, 0, 6], filler=filler)
        chunked, _ = run_prefill(*sequences.prefill([5, 0, 0, 5], [6, 9, 0, 1], 24))
        decoded, _ = decode(*sequences.decode())
        return chunked, decoded

    for clean, dirty in zip(both(0.0), both(filler), strict=True):
        np.testing.assert_array_equal(dirty, clean)


def test_a_sequence_of_nans_spoils_no_neighbour(run_prefill):
    healthy, sick = Sequences([11, 9, 6]), Sequences([11, 9, 6])
    for x in (sick.q, sick.k, sick.v):
        x[1][:] = np.nan
    step = [5, 0, 5], [6, 9, 1], 24
    out, _ = run_prefill(*sick.prefill(*step))
    expected, _ = run_prefill(*healthy.prefill(*step))
    for rows in (slice(0, 6), slice(15, 24)):
        np.testing.assert_array_equal(out[rows], expected[rows])
    out, _ = decode(*sick.decode())
    expected, _ = decode(*healthy.decode())
    for row in (0, 2):
        np.testing.assert_array_equal(out[row], expected[row])


def test_write_puts_real_tokens_in_their_slots_and_drops_the_rest():
    pool = jnp.zeros((3, 2, 2, 4, 8))
    k = jnp.arange(5 * 2 * 8, dtype=jnp.float32).reshape(5, 2, 8)
    out = write_kv(pool, k, -k, jnp.array([11, 12, 0, 500, 5], jnp.int32))
    expected = np.zeros(pool.shape, np.float32)
    for token, (block, offset) in {0: (2, 3), 2: (0, 0), 4: (1, 1)}.items():
        expected[block, 0, :, offset], expected[block, 1, :, offset] = k[token], -k[token]
    np.testing.assert_array_equal(out, expected)


def _memory(function, tokens, meta, donate=True):
    """memory_analysis() of a step over a float32 pool of 64 MiB, and the pool's bytes."""
    pool = jax.ShapeDtypeStruct((1024, 2, 2, 64, 64), jnp.float32)
    q, k = (jax.ShapeDtypeStruct((tokens, heads, 64), jnp.float32) for heads in (16, 2))
    step = jax.jit(lambda q, k, v, pool, meta: function(q, k, v, pool, meta, SCALE), donate_argnums=3)
    analysis = step.lower(q, k, k, pool, meta).compile().memory_analysis()
    return analysis, pool.size * 4


def _ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize(
    ("function", "tokens", "meta"),
    [
        (lambda q, k, v, pool, meta, scale: write_kv(pool, k, v, meta), 2048, _ints(2048)),
        (paged_prefill_xla, 2048, PagedPrefill(_ints(9), _ints(8), _ints(8, 512), _ints(2048))),
        (paged_decode_xla, 64, PagedDecode(_ints(64), _ints(64, 512), _ints(64))),
    ],
    ids=["write", "prefill", "decode"],
)
def test_donated_pools_are_written_in_place(function, tokens, meta):
    """No copy of the pool, and no matrix of scores: 16 heads x 2048 tokens x 32768 positions would take 4 GiB."""
    analysis, pool_bytes = _memory(function, tokens, meta)
    assert analysis.alias_size_in_bytes == pool_bytes
    assert analysis.temp_size_in_bytes < 48 << 20


@pytest.mark.parametrize(
    ("function", "tokens", "meta"),
    [
        (paged_prefill_xla, 256, PagedPrefill(_ints(9), _ints(8), _ints(8, 32), _ints(256))),
        (paged_decode_xla, 16, PagedDecode(_ints(16), _ints(16, 32), _ints(16))),
    ],
    ids=["prefill", "decode"],
)
def test_lowers_for_cuda(function, tokens, meta):
    pool = jax.ShapeDtypeStruct((64, 2, 4, 64, 128), jnp.bfloat16)
    q, k = (jax.ShapeDtypeStruct((tokens, heads, 128), jnp.bfloat16) for heads in (28, 4))
    traced = jax.jit(lambda *a: function(*a, SCALE)).trace(q, k, k, pool, meta)
    assert "stablehlo.while" in traced.lower(lowering_platforms=("cuda",)).as_text()
