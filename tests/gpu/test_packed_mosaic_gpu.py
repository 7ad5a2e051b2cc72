# SPDX-License-Identifier: Apache-2.0
"""Claim: on Hopper, packed attention through our own kernel equals plain masks, whatever lies outside the segments."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, normal, offsets, with_padding
from tolerances import HALF_ATTENTION

from kernels_pallas import mosaic
from kernels_pallas.dispatch import choices, local_device, vision_ops
from kernels_pallas.reference import packed_attention_reference

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not mosaic.available(local_device("gpu").compute_capability),
    reason="needs a Hopper GPU and the release of jax that the kernel is written for",
)

WIDTHS = sorted(mosaic.packed_tuning())
ODD, ALIGNED, TINY = (300, 1, 0, 699, 776, 0), (1024, 1024), (5, 4, 66, 125, 8)
# Windows of up to 64 patches that start at multiples of 4, and a bucket's unused ones.
WINDOWS = (*[64] * 4, 4, *[64] * 3, 48, 16, 12, 64, 36, 4, *[0] * 6)


def problem(width, tokens, real, heads=4, kv_heads=4, filler=np.nan, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    inputs = (with_padding(normal(rng, tokens, count, width), real, filler) for count in (heads, kv_heads, kv_heads))
    return [jnp.asarray(x, dtype) for x in inputs]


def attend(inputs, cu, longest=None, **changes):
    """Output in float32; `changes` go to the plan."""
    from kernels_pallas.packed_mosaic import make_plan, packed_attention_mosaic

    plan = replace(make_plan(*inputs[:2], len(cu) - 1, longest), **changes)
    out = jax.jit(lambda *a: packed_attention_mosaic(*a, SCALE / 2, plan))(*inputs, cu)
    return np.asarray(out, np.float32)


def check(out, inputs, cu):
    expected = jax.jit(packed_attention_reference)(*(x.astype(jnp.float32) for x in inputs), cu, SCALE / 2)
    np.testing.assert_allclose(out, expected, atol=HALF_ATTENTION[inputs[0].dtype.name])


@pytest.mark.parametrize("width", WIDTHS)
def test_is_chosen_where_the_table_says(width):
    choice, tuning = choices("gpu", "bfloat16", width), mosaic.packed_tuning()[width]
    assert (choice.packed == "mosaic") == tuning["chosen"]
    assert (choice.windowed == "mosaic") == (tuning["chosen"] and tuning["short"]["chosen"])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lengths", [ODD, ALIGNED, TINY], ids=str)
def test_segments(width, lengths):
    cu = offsets(*lengths)
    inputs = problem(width, -(-int(cu[-1] + 1) // 64) * 64, int(cu[-1]))
    check(attend(inputs, cu), inputs, cu)


@pytest.mark.parametrize(
    "changes", [{"stages": 3}, {"stages": 2}, {"keys": 64}, {"groups": 2, "registers": (240, 24)}], ids=str
)
def test_other_plans(changes):
    cu = offsets(*ODD)
    inputs = problem(80, 2048, int(cu[-1]))
    check(attend(inputs, cu, **changes), inputs, cu)


@pytest.mark.parametrize("width", WIDTHS)
def test_windows(width):
    cu = offsets(*WINDOWS)
    inputs = problem(width, 1024, int(cu[-1]))
    out = attend(inputs, cu, longest=64)
    check(out, inputs, cu)
    np.testing.assert_array_equal(out[cu[-1] :], 0)


def test_windows_as_a_tower_has_them():
    cu = offsets(*WINDOWS)
    clean, dirty = (problem(80, 1024, int(cu[-1]), filler=x) for x in (0.0, np.nan))
    run = jax.jit(lambda *a: vision_ops("gpu").windowed(*a, cu, SCALE / 2, 64).astype(jnp.float32))
    np.testing.assert_array_equal(run(*dirty), run(*clean))
    check(run(*dirty), dirty, cu)


def test_grouped_heads_and_float16():
    cu = offsets(*ODD)
    inputs = problem(80, 2048, int(cu[-1]), heads=8, kv_heads=2, dtype="float16")
    check(attend(inputs, cu), inputs, cu)


def test_more_tiles_than_programs():
    cu = offsets(*[9] * 200)
    inputs = problem(80, 2048, int(cu[-1]))
    check(attend(inputs, cu), inputs, cu)


def test_nothing_but_padding():
    inputs = problem(80, 512, 0)
    np.testing.assert_array_equal(attend(inputs, offsets(0, 0)), 0)


@pytest.mark.parametrize("filler", [np.nan, np.inf, 3e4])
def test_real_rows_are_bit_equal_whatever_lies_outside(filler):
    """Padding and a neighbour alike."""
    cu = offsets(300, 210)
    clean, dirty = (attend(problem(80, 640, 300, filler=x), cu) for x in (0.0, filler))
    np.testing.assert_array_equal(dirty[:300], clean[:300])
    clean, dirty = (attend(problem(80, 640, 510, filler=x), cu) for x in (0.0, filler))
    np.testing.assert_array_equal(dirty, clean)
