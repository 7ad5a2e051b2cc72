# SPDX-License-Identifier: Apache-2.0
"""Claim: the paged prefill kernel covers every token once, lowers for Hopper, and equals plain masks.

Pallas interprets the kernel here, with the stand-ins of packed attention; tests/gpu runs it as it is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, Sequences, offsets
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import HALF_ATTENTION, OTHER_LAYOUT

from kernels_pallas import dispatch, mosaic, mosaic_attention
from kernels_pallas.dispatch import PagedPrefill
from kernels_pallas.mosaic_attention import Plan
from kernels_pallas.paged_prefill_mosaic import make_plan, paged_prefill_mosaic, tile_table

needs_mosaic = pytest.mark.skipif(not mosaic.available((9, 0)), reason="the kernel is written for another jax")
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="Pallas interprets kernels on a CPU")

TOKENS = 640
PLAN = Plan("bfloat16", TOKENS, 3, 2, 1, 32, groups=2, keys=64, stages=2, registers=(240, 24), copies=4)
tables = jax.jit(tile_table, static_argnums=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 210), min_size=3, max_size=3), st.lists(st.integers(0, 500), min_size=3, max_size=3))
def test_every_token_has_one_tile_that_reads_all_it_sees(lengths, prefixes):
    cu = offsets(*lengths)
    *table, last = np.asarray(tables(PLAN, cu, np.array(prefixes, np.int32)))
    owner = np.zeros(TOKENS, int)
    for first, start, end, steps, sequence, prefix in table[: last[0]]:
        assert first % mosaic.ROW_TILE == 0
        rows = slice(max(first, start), min(first + PLAN.rows, end))
        assert rows.start < rows.stop
        owner[rows] += 1
        if start == cu[-1]:
            assert steps == 0
            continue
        assert (start, end, prefix) == (cu[sequence], cu[sequence + 1], prefixes[sequence])
        assert steps == -(-(prefix + rows.stop - start) // PLAN.keys)
    np.testing.assert_array_equal(owner, 1)


@needs_mosaic
@pytest.mark.parametrize(("width", "heads", "kv_heads", "page"), [(128, 28, 4, 64), (64, 14, 2, 16), (128, 8, 8, 128)])
def test_lowers_for_hopper(width, heads, kv_heads, page):
    q, k = (jax.ShapeDtypeStruct((2048, n, width), jnp.bfloat16) for n in (heads, kv_heads))
    pool = jax.ShapeDtypeStruct((100, 2, kv_heads, page, width), jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((5,), (4,), (4, 40), (2048,))]
    traced = jax.jit(lambda *a: paged_prefill_mosaic(*a[:4], PagedPrefill(*a[4:]), SCALE)).trace(q, k, k, pool, *ints)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic
@on_cpu
@pytest.mark.parametrize(
    ("prefixes", "chunks", "page"),
    [((0,), (200,), 16), ((70, 0, 131), (3, 90, 61), 16), ((0, 64, 5), (0, 1, 130), 32), ((63,), (65,), 64)],
    ids=str,
)
def test_equals_plain_masks(monkeypatch, prefixes, chunks, page):
    import packed_stand_ins
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(mosaic_attention, "_weigh", packed_stand_ins.weigh)
    monkeypatch.setattr(mosaic_attention, "_store_some", packed_stand_ins.store_some)
    lengths = [a + b for a, b in zip(prefixes, chunks, strict=True)]
    blocks = sum(-(-n // page) for n in lengths) + 2
    sequences = Sequences(lengths, 4, 2, 32, page, num_blocks=blocks, table_width=20, filler=np.nan, dtype="bfloat16")
    q, k, v, pool, meta = sequences.prefill(list(prefixes), list(chunks), tokens=256)
    q, k, v, pool = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, pool))
    plan = Plan("bfloat16", 256, len(chunks), 4, 2, 32, 2, 64, 2, (240, 24), copies=64 // page)
    with plgpu.force_gpu_interpret_mode():
        out, written = jax.jit(lambda *a: paged_prefill_mosaic(*a, SCALE, plan))(q, k, v, pool, meta)
    out, cu = np.asarray(out, np.float32), meta.cu_seqlens
    for s, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        expected = sequences.expected(s, prefix, length)
        np.testing.assert_allclose(out[cu[s] : cu[s + 1]], expected, atol=HALF_ATTENTION["bfloat16"])
    np.testing.assert_array_equal(out[cu[-1] :], 0)
    np.testing.assert_array_equal(np.asarray(written, np.float32), sequences.pool(lengths))


def test_sizes_are_those_of_packed_attention():
    q = jax.ShapeDtypeStruct((2048, 28, 128), jnp.bfloat16)
    plan = make_plan(q, jax.ShapeDtypeStruct((100, 2, 4, 64, 128), jnp.bfloat16), 8)
    row = mosaic.packed_tuning()[128]
    assert (plan.groups, plan.keys, plan.stages) == (row["groups"], row["keys"], row["stages"])
    assert (plan.segments, plan.copies, plan.kv_heads) == (8, 2, 4)


def test_steps_of_other_sizes_go_elsewhere(monkeypatch):
    monkeypatch.setattr(dispatch.cudnn, "available", lambda: False)
    sequences = Sequences([9, 30], filler=np.nan)
    run = jax.jit(lambda *a: dispatch._PREFILL["mosaic"](*a, SCALE))
    out, _ = run(*sequences.prefill([4, 0], [5, 30], tokens=36))
    np.testing.assert_allclose(out[:5], sequences.expected(0, 4, 9), atol=OTHER_LAYOUT)
