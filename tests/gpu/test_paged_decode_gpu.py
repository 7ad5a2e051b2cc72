# SPDX-License-Identifier: Apache-2.0
"""Claim: on Hopper, decode through our own kernel equals plain masks, however sequences are cut and pages filled."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, Sequences
from tolerances import HALF_ATTENTION

from kernels_pallas import mosaic
from kernels_pallas.dispatch import choices, local_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not mosaic.available(local_device("gpu").compute_capability),
    reason="needs a Hopper GPU and the release of jax that the kernel is written for",
)

QWEN, LLAMA, WIDE = (28, 4), (32, 8), (16, 2)
LENGTHS = [300, 1, 0, 129, 64, 500]


def sequences(lengths=LENGTHS, heads=QWEN, width=128, page=16, filler=np.nan, dtype="bfloat16"):
    names = {"heads": heads[0], "kv_heads": heads[1], "width": width, "page": page, "dtype": dtype}
    return Sequences(lengths, num_blocks=2048 // page, table_width=512 // page, filler=filler, **names)


def decode(case, alone=None, **changes):
    """Output of one step in float32, and the pages after it; `changes` go to the plan, `alone` is the only real row."""
    from kernels_pallas.paged_decode_mosaic import make_plan, paged_decode_mosaic

    half = partial(jnp.asarray, dtype=case.dtype)
    *qkv, pool, meta = case.decode()
    if alone is not None:
        meta = meta.replace(seq_lens=np.where(np.arange(len(case.lengths)) == alone, meta.seq_lens, 0))
    q, k, v, pool, meta = *map(half, qkv), half(pool), jax.tree.map(jnp.asarray, meta)
    plan = replace(make_plan(q, pool, meta.block_tables.shape[1]), **changes)
    run = jax.jit(lambda *a: paged_decode_mosaic(*a, SCALE / 2, plan), donate_argnums=3)
    out, pool = run(q, k, v, pool, meta)
    return np.asarray(out, np.float32), np.asarray(pool, np.float32)


def check(case, **changes):
    out, pool = decode(case, **changes)
    for s, length in enumerate(case.lengths):
        expected = case.expected(s, length - 1, length, SCALE / 2) if length else 0
        np.testing.assert_allclose(out[s : s + 1], expected, atol=HALF_ATTENTION[case.dtype])
    np.testing.assert_array_equal(pool, case.pool(case.lengths))


def test_is_chosen():
    assert choices("gpu", "bfloat16", 128, page=64, group=7).decode == "mosaic"


@pytest.mark.parametrize("heads", [QWEN, LLAMA, WIDE, (4, 4)], ids=str)
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_heads_and_pages(heads, page):
    check(sequences(heads=heads, page=page))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_head_dims(width, dtype):
    check(sequences(width=width, dtype=dtype, heads=(8, 2)))


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(("splits", "split_tokens"), [(1, 64), (2, 64), (4, 128), (8, 64)])
def test_parts(splits, split_tokens, longest_first):
    check(sequences(), splits=splits, split_tokens=split_tokens, longest_first=longest_first)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_stages(stages):
    check(sequences(), stages=stages)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("filler", [np.nan, np.inf])
def test_rows_are_bit_equal_whatever_pages_hold(splits, filler):
    clean, dirty = (decode(sequences(filler=x), splits=splits, split_tokens=64)[0] for x in (0.0, filler))
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("longest_first", [False, True])
def test_neighbours_do_not_matter(longest_first):
    case, options = sequences(), {"splits": 4, "split_tokens": 64, "longest_first": longest_first}
    together, _ = decode(case, **options)
    for row in (0, 3, 5):
        np.testing.assert_array_equal(decode(case, row, **options)[0][row], together[row])
