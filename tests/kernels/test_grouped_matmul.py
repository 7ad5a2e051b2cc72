# SPDX-License-Identifier: Apache-2.0
"""Claim: a grouped product multiplies each row by its group's matrix, and nothing else in the batch can touch it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from tolerances import OTHER_LAYOUT

from kernels_pallas import grouped_matmul as door
from kernels_pallas.grouped_matmul import choose, grouped_matmul
from kernels_pallas.grouped_matmul_mosaic import grouped_matmul_mosaic
from kernels_pallas.grouped_matmul_xla import grouped_matmul_xla
from kernels_pallas.row_groups import most_blocks, row_groups, spread

GROUPS = 6
laid_out = jax.jit(row_groups, static_argnums=(1, 2))
HOPPER = (9, 0)


@pytest.fixture
def hopper(monkeypatch):
    """The choices of a machine with a Hopper GPU."""
    monkeypatch.setattr(door, "cuda_capability", lambda: HOPPER)


def assigned(*sizes: int, seed: int = 0) -> np.ndarray:
    """The group of every row, shuffled, for groups of these sizes."""
    rows = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return np.random.default_rng(seed).permutation(rows)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, GROUPS - 1), min_size=24, max_size=24), st.sampled_from([1, 4, 8]))
def test_layout(group_of_row, block_rows):
    """Every row has a place of its own, in a block of its group, in order; blocks without rows come last."""
    layout = laid_out(np.array(group_of_row, np.int32), GROUPS, block_rows)
    slot, source, group = (np.asarray(x) for x in layout[:3])
    assert len(group) == most_blocks(24, GROUPS, block_rows)
    assert layout.block_rows == block_rows
    assert np.array_equal(source[slot], np.arange(24))
    assert sorted(source)[24:] == [24] * (len(source) - 24)
    assert np.array_equal(group[slot // block_rows], group_of_row)
    for each in range(GROUPS):
        assert np.all(np.diff(slot[np.array(group_of_row) == each]) > 0)
    assert int(layout.count) == sum(-(-group_of_row.count(each) // block_rows) for each in range(GROUPS))
    assert slot.max() < int(layout.count) * block_rows


@pytest.mark.parametrize("sizes", [(1500, 0, 700, 300, 0, 1), (0, 0, 2501, 0, 0, 0)], ids=str)
def test_layout_of_more_rows_than_are_ranked_at_once(sizes):
    group_of_row = assigned(*sizes)
    layout = laid_out(group_of_row, GROUPS, 64)
    order = np.asarray(layout.source)[np.asarray(layout.source) < len(group_of_row)]
    assert np.array_equal(order, np.argsort(group_of_row, kind="stable"))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, GROUPS - 1), min_size=24, max_size=24), st.integers(0, 99))
def test_equals_a_loop_over_rows(group_of_row, seed):
    """Groups without rows and one group with all rows included."""
    rng = np.random.default_rng(seed)
    x, matrices = rng.standard_normal((12, 16), np.float32), rng.standard_normal((GROUPS, 16, 8), np.float32)
    out = product(x, matrices, np.array(group_of_row, np.int32))
    expected = [x[row // 2] @ matrices[group] for row, group in enumerate(group_of_row)]
    np.testing.assert_allclose(out, np.stack(expected), atol=OTHER_LAYOUT)


@jax.jit
def product(x, matrices, group_of_row):
    """Two rows a token, through the layout of this machine."""
    groups = door.group_rows(group_of_row, len(matrices))
    return grouped_matmul(spread(x, groups, len(group_of_row) // len(x)), matrices, groups)[groups.slot]


def test_nothing_spreads_from_other_rows_or_unused_matrices():
    rng = np.random.default_rng(0)
    x, matrices = rng.standard_normal((12, 16), np.float32), rng.standard_normal((GROUPS, 16, 8), np.float32)
    group_of_row = assigned(8, 0, 9, 7, 0, 0)
    clean = np.asarray(product(x, matrices, group_of_row))
    x[10:], matrices[[1, 4, 5]] = np.nan, np.nan
    moved = group_of_row.copy()
    moved[20:] = 0  # what is padding may also be routed elsewhere
    dirty = np.asarray(product(x, matrices, moved))
    assert np.array_equal(dirty[:20], clean[:20])
    assert np.isnan(dirty[20:]).all()


@pytest.mark.parametrize(
    ("capability", "dtype", "inner", "outer", "expected"),
    [
        (HOPPER, "bfloat16", 2048, 1536, "mosaic"),
        (HOPPER, "float16", 768, 2048, "mosaic"),
        (HOPPER, "float32", 2048, 1536, "xla"),
        (HOPPER, "bfloat16", 2048, 192, "xla"),
        (HOPPER, "bfloat16", 96, 1536, "xla"),
        ((8, 0), "bfloat16", 2048, 1536, "xla"),
        ((10, 0), "bfloat16", 2048, 1536, "xla"),
        ((0, 0), "bfloat16", 2048, 1536, "xla"),
    ],
)
def test_choice(capability, dtype, inner, outer, expected):
    assert choose(capability, dtype, inner, outer) == expected


def test_kernel_in_the_interpreter():
    """The Hopper kernel, simulated: equal to the loop in XLA on the same, already rounded inputs."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((50, 128)), jnp.bfloat16)
    matrices = jnp.asarray(rng.standard_normal((3, 128, 128)), jnp.bfloat16)
    groups = laid_out(assigned(30, 0, 70), 3, 64)
    rows = spread(x, groups, 2)
    ours = grouped_matmul_mosaic(rows, matrices, groups, interpret=InterpretGPUParams())
    expected = grouped_matmul_xla(rows.astype(jnp.float32), matrices.astype(jnp.float32), groups)
    expected = expected.astype(jnp.bfloat16)
    one_ulp = np.abs(expected.astype(jnp.float32)) * 2**-7
    error = np.abs(ours.astype(jnp.float32) - expected.astype(jnp.float32))
    assert np.all((error <= one_ulp + OTHER_LAYOUT)[groups.slot])


@pytest.mark.parametrize("rows", [128, 32768])
def test_kernel_lowers_for_cuda(hopper, rows):
    def both(x, matrices, group_of_row):
        groups = door.group_rows(group_of_row, len(matrices))
        return grouped_matmul(spread(x, groups, 8), matrices, groups)[groups.slot]

    shapes = (((rows // 8, 2048), jnp.bfloat16), ((128, 2048, 1536), jnp.bfloat16), ((rows,), jnp.int32))
    traced = jax.jit(both).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()
