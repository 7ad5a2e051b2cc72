# SPDX-License-Identifier: Apache-2.0
"""Claim: DeepSeek-V4.1 plans grids by its published rule, and the bounds that size the encoder hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.models.deepseek_v4_1.grid import (
    Grid,
    GridRule,
    fewest_patches,
    most_patches,
    most_rows,
    plan_grid,
    worst_grid,
)

RULE = GridRule(patch=14, cell=3, max_span=1024, min_pixels=295936, max_ratio=None)

# (width, height): rows, columns; pixel height, width; patches; span. Worked out by hand from the rule.
TABLE = {
    (64, 48): (12, 15, 476, 630, 1530, 194),
    (64, 64): (13, 13, 546, 546, 1521, 184),
    (224, 224): (13, 13, 546, 546, 1521, 184),
    (448, 448): (13, 13, 546, 546, 1521, 184),
    (544, 544): (13, 13, 546, 546, 1521, 184),
    (300, 200): (11, 16, 448, 672, 1536, 189),
    (640, 480): (12, 16, 490, 644, 1610, 206),
    (1024, 1024): (25, 25, 1036, 1036, 5476, 652),
    (1280, 720): (18, 31, 728, 1288, 4784, 578),
    (1920, 1080): (23, 41, 966, 1708, 8418, 968),
    (1344, 1344): (31, 31, 1302, 1302, 8649, 994),
    (2000, 2000): (31, 31, 1302, 1302, 8649, 994),
    (4000, 4000): (31, 31, 1302, 1302, 8649, 994),
    (8000, 8000): (31, 31, 1302, 1302, 8649, 994),
    (4000, 200): (5, 96, 210, 4004, 4290, 487),
    (8000, 48): (2, 191, 56, 8008, 2288, 386),
    (48, 8000): (191, 2, 8008, 56, 2288, 575),
    (1, 4000): (511, 1, 21462, 42, 4599, 1024),
    (4000, 1): (1, 820, 14, 34412, 2458, 823),
}


def described(grid: Grid, rule: GridRule = RULE) -> tuple[int, ...]:
    return grid.rows, grid.columns, grid.height * rule.patch, grid.width * rule.patch, grid.patches, grid.span


@pytest.mark.parametrize("size", TABLE, ids="{0[0]}x{0[1]}".format)
def test_the_grid_of_a_picture(size):
    width, height = size
    assert described(plan_grid(height, width, RULE)) == TABLE[size]


def test_a_cap_on_the_ratio_narrows_flat_pictures():
    assert described(plan_grid(200, 4000, replace(RULE, max_ratio=4))) == (7, 26, 280, 1092, 1560, 191)


# Budget in patches: height and width in patches, span.
WORST = {None: (3, 3063, 1024), 1024: (1, 1024, 345), 4096: (2, 2048, 686), 8192: (32, 256, 959)}


@pytest.mark.parametrize("budget", WORST)
def test_the_worst_grid_within_a_budget(budget):
    grid = worst_grid(RULE, budget)
    assert (grid.height, grid.width, grid.span) == WORST[budget]


def test_the_largest_picture():
    assert most_patches(RULE) == worst_grid(RULE).patches == 9189


sides = st.integers(1, 100_000) | st.integers(1, 300)
rules = st.builds(
    GridRule,
    patch=st.integers(1, 16),
    cell=st.integers(1, 4),
    max_span=st.integers(4, 1500),
    min_pixels=st.integers(0, 300_000),
    max_ratio=st.none() | st.floats(0.2, 20),
)


@given(st.one_of(st.just(RULE), rules), st.lists(st.tuples(sides, sides), min_size=1, max_size=4))
def test_no_picture_exceeds_the_bounds(rule, sizes):
    grids = [plan_grid(*size, rule) for size in sizes]
    for grid in grids:
        assert grid.height > 0 < grid.width
        assert grid.span <= rule.max_span
        assert fewest_patches(rule) <= grid.patches <= most_patches(rule)
    assert sum(grid.span for grid in grids) <= most_rows(sum(grid.patches for grid in grids), rule)
