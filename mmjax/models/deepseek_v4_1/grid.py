# SPDX-License-Identifier: Apache-2.0
"""Which patch grid a picture gets, how many prompt positions it takes, and the worst of both."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Parts of a span that are no picture: its start and its end. Each row of cells adds a newline.
_ENDS = 2


@dataclass(frozen=True)
class GridRule:
    """What decides about a picture's grid.

    Attributes:
      patch: pixels along one side of a patch.
      cell: patches along one side of a cell, which becomes one embedding row.
      max_span: prompt positions that one picture may take; at least 4.
      min_pixels: area below which a picture is enlarged.
      max_ratio: width may exceed height by this factor; None for no such limit.
    """

    patch: int
    cell: int
    max_span: int
    min_pixels: int
    max_ratio: float | None

    @property
    def cell_pixels(self) -> int:
        return self.patch * self.cell


@dataclass(frozen=True)
class Grid:
    """A picture's patches along height and width, in cells of `cell` x `cell` patches (the last ones may be cut)."""

    height: int
    width: int
    cell: int

    @property
    def rows(self) -> int:
        return -(-self.height // self.cell)

    @property
    def columns(self) -> int:
        return -(-self.width // self.cell)

    @property
    def patches(self) -> int:
        return self.height * self.width

    @property
    def span(self) -> int:
        """Prompt positions and embedding rows: start, for each row its cells and a newline, end."""
        return self.rows * (self.columns + 1) + _ENDS


def plan_grid(height: int, width: int, rule: GridRule) -> Grid:
    """The grid of a picture of `height` x `width` pixels.

    Too flat ones are narrowed, too small ones enlarged, and what would take too many positions shrinks to the largest
    whole number of cells along the side that binds.
    """
    w, h = float(width), float(height)
    if rule.max_ratio is not None and w > rule.max_ratio * h:
        w = rule.max_ratio * h
    if w * h < rule.min_pixels:
        scale = math.sqrt(rule.min_pixels / (w * h))
        w, h = max(1, int(w * scale)), max(1, int(h * scale))
    grid = Grid(math.ceil(h / rule.patch), math.ceil(w / rule.patch), rule.cell)
    return grid if grid.span <= rule.max_span else _shrunk(h, w, rule)


def _shrunk(h: float, w: float, rule: GridRule) -> Grid:
    """The grid of sides h, w (pixels) within the limit: columns solve rows * (columns + 1) = room at their ratio."""
    room, ratio = rule.max_span - _ENDS, h / w
    columns = math.sqrt(room / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return Grid(room // 2 * rule.cell, rule.cell, rule.cell)
    if rows < 1:
        return Grid(rule.cell, (room - 1) * rule.cell, rule.cell)
    cell = rule.cell_pixels
    scale = min(math.floor(columns) * cell / w, math.floor(rows) * cell / h)
    height, width = (max(1, math.floor(side * scale / rule.patch)) for side in (h, w))
    return Grid(height, width, rule.cell)


def most_patches(rule: GridRule) -> int:
    """Patches of the largest picture: one row of cells, as long as the span's limit allows."""
    return rule.cell**2 * (rule.max_span - _ENDS - 1)


def worst_grid(rule: GridRule, budget: int | None = None) -> Grid:
    """The grid of most patches, at most `budget` (None: no limit), within the span's limit; the lowest such grid."""
    budget = most_patches(rule) if budget is None else budget
    best = None
    for height in range(1, budget + 1):
        rows = -(-height // rule.cell)
        columns = (rule.max_span - _ENDS) // rows - 1
        width = min(columns * rule.cell, budget // height)
        if width < 1:
            break
        grid = Grid(height, width, rule.cell)
        if best is None or grid.patches > best.patches:
            best = grid
    if best is None:
        raise ValueError(f"no grid has at most {budget} patches and {rule.max_span} positions")
    return best


def fewest_patches(rule: GridRule) -> int:
    """No legal picture has fewer patches; a bound, not always reached.

    Enlarging cuts each side to whole pixels, which costs a fifteenth of the area at most once sides are patches. In
    shrinking, whole cells cost half of a side at most, and so a quarter of the area; whole patches cost as much again.
    """
    enlarged = int(rule.min_pixels / rule.patch**2 * rule.patch / (rule.patch + 1)) - 1
    shrunk = rule.cell**2 * (rule.max_span - _ENDS) // 32
    return max(1, min(enlarged, shrunk))


def most_rows(tokens: int, rule: GridRule) -> int:
    """Embedding rows that pictures of `tokens` patches in all may take at most.

    A grid of P patches takes most when it is one patch wide: a cell and a newline for each three patches.
    """
    pictures = max(1, tokens // fewest_patches(rule))
    slope = rule.cell
    loose = (2 * tokens + pictures * (4 * slope - 2)) // slope
    return min(loose, pictures * rule.max_span)
