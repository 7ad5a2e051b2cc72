# SPDX-License-Identifier: Apache-2.0
"""Claim: the packed attention kernel covers every row once, lowers for Hopper, and equals plain masks.

Pallas interprets the kernel here, with stand-ins for the product with weights in registers and for single rows;
tests/gpu runs it as it is.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, normal, offsets, with_padding
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import HALF_ATTENTION, OTHER_LAYOUT

from kernels_pallas import dispatch, mosaic, mosaic_attention
from kernels_pallas.mosaic_attention import Plan
from kernels_pallas.packed_mosaic import make_plan, packed_attention_mosaic, tile_table
from kernels_pallas.packed_xla import packed_attention_xla
from kernels_pallas.reference import packed_attention_reference

needs_mosaic = pytest.mark.skipif(not mosaic.available((9, 0)), reason="the kernel is written for another jax")

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="Pallas interprets kernels on a CPU")

SMALL = Plan("bfloat16", 256, 3, 1, 1, 32, groups=2, keys=64, stages=2, registers=(240, 24))
tables = jax.jit(tile_table, static_argnums=0)


def shapes(width, tokens=2048, heads=16, kv_heads=16, segments=4, dtype="bfloat16"):
    q, k = (jax.ShapeDtypeStruct((tokens, n, width), dtype) for n in (heads, kv_heads))
    return q, k, k, jax.ShapeDtypeStruct((segments + 1,), jnp.int32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=3, max_size=3), st.integers(0, 30))
def test_every_row_has_one_tile(lengths, padding):
    cu = offsets(*lengths)
    tokens = 1280
    plan = replace(SMALL, tokens=tokens)
    cu = np.minimum(cu, tokens - padding).astype(np.int32)
    *table, last = np.asarray(tables(plan, cu))
    owner = np.zeros(tokens, int)
    for first, start, end, steps in table[: last[0]]:
        assert first % mosaic.ROW_TILE == 0
        rows = slice(max(first, start), min(first + plan.rows, end))
        assert rows.start < rows.stop
        owner[rows] += 1
        first_key = start // mosaic.ROW_TILE * mosaic.ROW_TILE
        real = end <= cu[-1]
        assert steps == (-(-(end - first_key) // plan.keys) if real else 0)
    np.testing.assert_array_equal(owner, 1)


@needs_mosaic
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 4}, {"segments": 64}, {"tokens": 8, "segments": 1}], ids=str)
def test_lowers_for_hopper(width, sizes):
    traced = jax.jit(lambda *a: packed_attention_mosaic(*a, SCALE)).trace(*shapes(width, **sizes))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic
@pytest.mark.parametrize("width", sorted(mosaic.packed_tuning()))
def test_windows_lower_for_hopper(width):
    traced = jax.jit(lambda *a: dispatch._WINDOWED["mosaic"](*a, SCALE, 64)).trace(*shapes(width, segments=40))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("longest", "short"), [(64, True), (65, False), (None, False)])
def test_short_segments_have_sizes_of_their_own(longest, short):
    q, k, _, _ = shapes(80)
    row = mosaic.packed_tuning()[80]
    assert make_plan(q, k, 4, longest).groups == (row["short"] if short else row)["groups"]


@needs_mosaic
def test_gradients_are_those_of_xla():
    q, _, _, cu = shapes(80, tokens=64, heads=2, kv_heads=2, segments=1)

    def lowered(attend):
        loss = jax.grad(lambda q, cu: attend(q, q, q, cu, SCALE).astype(jnp.float32).sum())
        return jax.jit(loss).trace(q, cu).lower(lowering_platforms=("cuda",)).as_text()

    assert lowered(packed_attention_mosaic).count("dot_general") == lowered(packed_attention_xla).count("dot_general")


@pytest.fixture
def interpreted(monkeypatch):
    """A function (q, k, v, cu_seqlens, plan) that runs the kernel without a GPU."""
    import packed_stand_ins
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(mosaic_attention, "_weigh", packed_stand_ins.weigh)
    monkeypatch.setattr(mosaic_attention, "_store_some", packed_stand_ins.store_some)

    def run(q, k, v, cu, plan):
        with plgpu.force_gpu_interpret_mode():
            return jax.jit(lambda *a: packed_attention_mosaic(*a, SCALE, plan))(q, k, v, cu)

    return run


@needs_mosaic
@on_cpu
@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ((128, 64, 64), {}),
        ((3, 61, 131), {}),
        ((256, 0, 0), {"stages": 3}),
        ((0, 0, 0), {}),
        ((60, 130, 60), {"heads": 4, "kv_heads": 2}),
        ((150, 1, 90), {"groups": 3, "keys": 128, "stages": 4}),
        ((9, 9, 9), {"heads": 2, "segments": 20}),
        ((4, 64, 64), {"groups": 1, "segments": 6}),
    ],
    ids=str,
)
def test_equals_plain_masks(interpreted, lengths, changes):
    plan = replace(SMALL, **changes)
    cu = offsets(*lengths, *[9] * (plan.segments - 3))
    rng = np.random.default_rng(0)
    inputs = [
        jnp.asarray(with_padding(normal(rng, plan.tokens, n, plan.width), int(cu[-1]), np.nan), plan.dtype)
        for n in (plan.heads, plan.kv_heads, plan.kv_heads)
    ]
    out = np.asarray(interpreted(*inputs, cu, plan), np.float32)
    expected = packed_attention_reference(*(x.astype(jnp.float32) for x in inputs), cu, SCALE)
    np.testing.assert_allclose(out, expected, atol=HALF_ATTENTION[plan.dtype])


def test_many_short_segments_take_turns():
    """The case of 20 segments above has more tiles than programs."""
    plan = replace(SMALL, heads=2, segments=20)
    assert plan.programs < plan.heads * 20


@pytest.mark.parametrize(
    ("dtype", "width", "served"), [("bfloat16", 80, True), ("bfloat16", 72, False), ("float16", 80, False)]
)
def test_what_is_served(monkeypatch, dtype, width, served):
    monkeypatch.setattr(mosaic, "packed_tuning", lambda: {80: {"chosen": True}})
    assert mosaic.serves_packed(dtype, width) == served


@pytest.mark.parametrize("longest", [None, 64])
@pytest.mark.parametrize("width", sorted(mosaic.packed_tuning()))
def test_blocks_fit_into_shared_memory(width, longest):
    q, k, _, _ = shapes(width)
    plan = make_plan(q, k, 4, longest)
    assert 2 * width * (plan.rows + 2 * plan.stages * plan.keys) < 227 << 10
    assert plan.groups * plan.registers[0] + plan.registers[1] <= 512


@pytest.mark.parametrize(("tokens", "causal"), [(44, False), (48, True)])
def test_what_it_cannot_do_goes_elsewhere(monkeypatch, tokens, causal):
    monkeypatch.setattr(dispatch.cudnn, "available", lambda: False)
    q = jnp.asarray(normal(np.random.default_rng(0), tokens, 2, 80))
    cu = offsets(tokens)
    ours = dispatch._PACKED["mosaic"](q, q, q, cu, SCALE, causal)
    np.testing.assert_allclose(ours, packed_attention_xla(q, q, q, cu, SCALE, causal), atol=OTHER_LAYOUT)
