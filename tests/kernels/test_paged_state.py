# SPDX-License-Identifier: Apache-2.0
"""Claim: state read from pages is the state that was written, whatever chunks wrote it and whatever else pages hold."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_kv import PagedDecode, PagedPrefill
from kernels_pallas.paged_state import map_decode, map_prefill, rows_reader, state_reader, write_state

PAGE, BLOCKS, WIDTH, TABLE = 4, 40, 3, 12
LENGTHS = (37, 5, 14)
TABLES = np.random.default_rng(0).permutation(BLOCKS)[: len(LENGTHS) * TABLE].reshape(len(LENGTHS), TABLE)
STATES = [np.random.default_rng(i).normal(size=(n, WIDTH)).astype(np.float32) for i, n in enumerate(LENGTHS)]


def slots(sequence: int, begin: int, end: int) -> np.ndarray:
    at = np.arange(begin, end)
    return TABLES[sequence][at // PAGE] * PAGE + at % PAGE


def filled(lengths=LENGTHS) -> jax.Array:
    """Pages with the first tokens of every sequence, NaN everywhere else."""
    pages = jnp.full((BLOCKS, 1, 1, PAGE, WIDTH), jnp.nan)
    for sequence, length in enumerate(lengths):
        pages = write_state(pages, jnp.asarray(STATES[sequence][:length]), jnp.asarray(slots(sequence, 0, length)))
    return pages


def sums(queries, first, read, longest):
    """Of each token: its query, times the sum of all states up to it, and the state before it."""
    (scale,) = queries
    everything = read(jnp.arange(longest))
    position = first + jnp.arange(len(scale))
    seen = (jnp.arange(longest) <= position[:, None])[..., None]
    total = jnp.where(seen, everything, 0).sum(1)
    return jnp.concatenate([scale[:, None] * total, read(position - 1)], axis=1)


def expected(sequence: int, scale: np.ndarray, begin: int) -> np.ndarray:
    state = STATES[sequence]
    totals = np.cumsum(state, axis=0)[begin : begin + len(scale)]
    before = np.concatenate([np.zeros((1, WIDTH)), state])[begin : begin + len(scale)]
    return np.concatenate([scale[:, None] * totals, before], axis=1)


def test_a_reader_gives_zeros_outside_its_sequence():
    pages = filled()
    for sequence, length in enumerate(LENGTHS):
        at = jnp.arange(-3, TABLE * PAGE).reshape(3, -1)
        found = state_reader(pages, jnp.asarray(TABLES[sequence]), jnp.int32(length))(at)
        plain = rows_reader(jnp.asarray(STATES[sequence]))(at)
        assert np.array_equal(found, plain)
        rows = np.asarray(found).reshape(-1, WIDTH)
        assert np.array_equal(rows[3 : 3 + length], STATES[sequence])
        assert not rows[:3].any()
        assert not rows[3 + length :].any()


@pytest.mark.parametrize("tokens", [32, 200])  # below and above a tile
@pytest.mark.parametrize("prefixes", [(0, 0, 0), (30, 2, 9), (7, 4, 0)])
def test_prefill(prefixes, tokens):
    chunks = [min(length - prefix, 9) for length, prefix in zip(LENGTHS, prefixes, strict=True)]
    pages = filled([prefix + chunk for prefix, chunk in zip(prefixes, chunks, strict=True)])
    ends = np.cumsum([0, *chunks, 0])
    meta = PagedPrefill(
        cu_seqlens=jnp.asarray(ends, jnp.int32),
        prefix_lens=jnp.asarray([*prefixes, 0], jnp.int32),
        block_tables=jnp.asarray(np.concatenate([TABLES, TABLES[:1]]), jnp.int32),
        slots=jnp.zeros(tokens, jnp.int32),
    )
    scale = np.random.default_rng(9).normal(size=tokens).astype(np.float32)
    shape = jax.ShapeDtypeStruct((tokens, 2 * WIDTH), jnp.float32)
    out = np.asarray(jax.jit(lambda scale, pages: map_prefill(sums, (scale,), pages, meta, shape))(scale, pages))
    for sequence, (begin, end) in enumerate(pairwise(ends[:-1])):
        wanted = expected(sequence, scale[begin:end], prefixes[sequence])
        np.testing.assert_allclose(out[begin:end], wanted, rtol=0, atol=1e-5)
    assert not out[ends[-1] :].any()


def test_decode():
    lengths = [37, 0, 5, 14, 14]
    sequences = [0, 0, 1, 2, 2]
    meta = PagedDecode(
        seq_lens=jnp.asarray(lengths, jnp.int32),
        block_tables=jnp.asarray(TABLES[sequences], jnp.int32),
        slots=jnp.zeros(5, jnp.int32),
    )
    scale = np.arange(1, 6, dtype=np.float32)
    out = np.asarray(jax.jit(lambda scale, pages: map_decode(sums, (scale,), pages, meta))(scale, filled()))
    assert not out[1].any()
    for row in (0, 2, 3, 4):
        wanted = expected(sequences[row], scale[row : row + 1], lengths[row] - 1)[0]
        np.testing.assert_allclose(out[row], wanted, rtol=0, atol=1e-5)
