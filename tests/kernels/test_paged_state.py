# SPDX-License-Identifier: Apache-2.0
"""Claim: state read from pages is the state that was written, whatever chunks wrote it and whatever else pages hold."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_kv import PagedDecode, PagedPrefill
from kernels_pallas.paged_state import (
    closing_windows,
    map_decode,
    map_prefill,
    read_windows,
    rows_reader,
    state_reader,
    write_columns,
    write_state,
)

PAGE, BLOCKS, WIDTH, TABLE = 4, 40, 3, 12
LENGTHS = (37, 5, 14)
ALL = slice(0, WIDTH)
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
    everything = read(jnp.arange(longest), ALL)
    position = first + jnp.arange(len(scale))
    seen = (jnp.arange(longest) <= position[:, None])[..., None]
    total = jnp.where(seen, everything, 0).sum(1)
    return jnp.concatenate([scale[:, None] * total, read(position - 1, ALL)], axis=1)


def expected(sequence: int, scale: np.ndarray, begin: int) -> np.ndarray:
    state = STATES[sequence]
    totals = np.cumsum(state, axis=0)[begin : begin + len(scale)]
    before = np.concatenate([np.zeros((1, WIDTH)), state])[begin : begin + len(scale)]
    return np.concatenate([scale[:, None] * totals, before], axis=1)


def test_a_reader_gives_zeros_outside_its_sequence():
    pages = filled()
    for sequence, length in enumerate(LENGTHS):
        at = jnp.arange(-3, TABLE * PAGE).reshape(3, -1)
        table, state = jnp.asarray(TABLES[sequence]), jnp.asarray(STATES[sequence])
        found = jax.jit(lambda at, table=table, length=length: state_reader(pages, table, length)(at, ALL))(at)
        plain = jax.jit(lambda at, state=state: rows_reader(state)(at, ALL))(at)
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


def stored(pages, sequence: int, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(pages)[TABLES[sequence][tokens // PAGE], 0, 0, tokens % PAGE]


def put_sums(pages, meta, tokens: int, size: int) -> jax.Array:
    """In columns 1 and 2 at the last token of each window: a sum over the window and the token before it."""
    windows = closing_windows(pages, meta, tokens, size)
    at = windows.number[:, None] * size + jnp.arange(-1, size)
    values = read_windows(pages, windows, at, slice(0, 1)).sum(1)
    return write_columns(pages, jnp.concatenate([values, -values], axis=1), windows.slots, slice(1, 3))


def check_sums(pages, sequence: int, begin: int, end: int, size: int) -> int:
    """Checks tokens begin .. end - 1 of a sequence, and returns how many windows end there."""
    state = STATES[sequence]
    number = 0
    for token in range(begin, end):
        found = stored(pages, sequence, np.array([token]))[0]
        wanted = state[token].copy()
        if token % size == size - 1:
            number += 1
            wanted[1] = state[max(0, token - size) : token + 1, 0].sum()
            wanted[2] = -wanted[1]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    return number


@pytest.mark.parametrize("size", [1, 3, 8])
def test_windows_that_end_in_a_prefill_step(size):
    prefixes, chunks = (6, 4, 0), (31, 0, 14)
    pages = filled([prefix + chunk for prefix, chunk in zip(prefixes, chunks, strict=True)])
    meta = PagedPrefill(
        cu_seqlens=jnp.asarray(np.cumsum([0, *chunks, 0]), jnp.int32),
        prefix_lens=jnp.asarray([*prefixes, 0], jnp.int32),
        block_tables=jnp.asarray(np.concatenate([TABLES, TABLES[:1]]), jnp.int32),
        slots=jnp.zeros(50, jnp.int32),
    )
    after = jax.jit(lambda pages: put_sums(pages, meta, 50, size))(pages)
    found = sum(check_sums(after, i, p, p + c, size) for i, (p, c) in enumerate(zip(prefixes, chunks, strict=True)))
    assert found > 45 // size - 3
    for sequence, prefix in enumerate(prefixes):
        before = np.arange(prefix)
        assert np.array_equal(stored(after, sequence, before), stored(pages, sequence, before))


def test_windows_that_end_in_a_decode_step():
    lengths, sequences = [32, 0, 5, 14], [0, 0, 1, 2]
    meta = PagedDecode(
        seq_lens=jnp.asarray(lengths, jnp.int32),
        block_tables=jnp.asarray(TABLES[sequences], jnp.int32),
        slots=jnp.zeros(4, jnp.int32),
    )
    pages = filled((32, 5, 14))
    after = jax.jit(lambda pages: put_sums(pages, meta, 4, 8))(pages)
    assert check_sums(after, 0, 31, 32, 8) == 1
    changed = np.argwhere((np.asarray(after) != np.asarray(pages)) & ~np.isnan(np.asarray(pages)))
    assert {tuple(at[[0, 3]]) for at in changed} == {(TABLES[0][31 // PAGE], 31 % PAGE)}
