# SPDX-License-Identifier: Apache-2.0
"""Claim: a grouped product multiplies each row by its group's matrix, and nothing else in the batch can touch it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from tolerances import HALF_PRODUCT, OTHER_LAYOUT

from kernels_pallas import grouped_matmul as door
from kernels_pallas.grouped_matmul import choose, grouped_matmul
from kernels_pallas.grouped_matmul_persistent import grouped_matmul_persistent
from kernels_pallas.grouped_matmul_tiles import grouped_matmul_tiles
from kernels_pallas.grouped_matmul_xla import grouped_matmul_xla
from kernels_pallas.row_groups import most_blocks, row_groups, spread

GROUPS = 6
laid_out = jax.jit(row_groups, static_argnums=(1, 2))


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
    ("hopper", "dtype", "inner", "outer", "rows", "expected"),
    [
        (True, "bfloat16", 2048, 1536, 64, "tiles"),
        (True, "bfloat16", 2048, 1536, 128, "persistent"),
        (True, "float16", 768, 2048, 128, "persistent"),
        (True, "float32", 2048, 1536, 128, "xla"),
        (True, "bfloat16", 2048, 384, 64, "xla"),
        (True, "bfloat16", 96, 1536, 64, "xla"),
        (False, "bfloat16", 2048, 1536, 64, "xla"),
    ],
)
def test_choice(hopper, dtype, inner, outer, rows, expected):
    assert choose(hopper, dtype, inner, outer, rows) == expected


def test_the_gate():
    """silu(gate) * up, gate first."""
    x, matrices = jnp.ones((1, 1)), jnp.array([[[-1.0, 2.0, 5.0, 7.0]]])
    groups = door.group_rows(jnp.zeros(1, jnp.int32), 1)
    out = door.grouped_gated_matmul(spread(x, groups, 1), matrices, groups)[groups.slot]
    expected = [[-1 / (1 + np.exp(1)) * 5, 2 / (1 + np.exp(-2)) * 7]]
    np.testing.assert_allclose(out, expected, atol=OTHER_LAYOUT)


KERNELS = {
    "tiles": grouped_matmul_tiles,
    "persistent": partial(grouped_matmul_persistent, multiprocessors=2),
    "persistent gated": partial(grouped_matmul_persistent, multiprocessors=2, gated=True),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_in_the_interpreter(kernel):
    """The Hopper kernels, simulated: equal to the loop in XLA on the same, already rounded inputs."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((50, 128)), jnp.bfloat16)
    matrices = jnp.asarray(rng.standard_normal((3, 128, 256)) * 0.05, jnp.bfloat16)
    groups = laid_out(assigned(30, 0, 70), 3, 64)
    rows = spread(x, groups, 2)
    ours = KERNELS[kernel](rows, matrices, groups, interpret=InterpretGPUParams())
    expected = grouped_matmul_xla(rows.astype(jnp.float32), matrices.astype(jnp.float32), groups)
    if kernel == "persistent gated":
        gate, up = jnp.split(expected, 2, axis=-1)
        expected = jax.nn.silu(gate) * up
    assert ours.shape == expected.shape
    error = np.abs(ours.astype(jnp.float32) - expected)[groups.slot]
    assert error.max() <= HALF_PRODUCT["bfloat16"]


@pytest.mark.parametrize(("rows", "block_rows"), [(128, 64), (16376, 64), (16384, 128), (32768, 128)])
def test_kernels_lower_for_cuda(monkeypatch, rows, block_rows):
    """Few rows and many, as on a machine with a Hopper GPU: the mean of 128 groups is 128 rows from 16384 on."""
    monkeypatch.setattr(door, "on_hopper", lambda: True)

    def both(x, gate_up, down, group_of_row):
        groups = door.group_rows(group_of_row, len(down))
        assert groups.block_rows == block_rows
        return grouped_matmul(door.grouped_gated_matmul(spread(x, groups, 8), gate_up, groups), down, groups)

    shapes = ((rows // 8, 2048), (128, 2048, 1536), (128, 768, 2048))
    inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(both).trace(*inputs, jax.ShapeDtypeStruct((rows,), jnp.int32))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()
