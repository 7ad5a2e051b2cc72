# SPDX-License-Identifier: Apache-2.0
"""Index tables of the tower of DeepSeek-V4.1, and the packing of several pictures into one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int32

from mmjax.errors import EngineError
from mmjax.inputs.items import EncoderBucket, ProcessedItem
from mmjax.models.deepseek_v4_1.grid import Grid
from mmjax.models.deepseek_v4_1.inputs import END, NEWLINE, START, DeepseekVisionInputs, cell_capacity
from mmjax.models.images.packing import grid_positions, read_only

_HOLE = -1


@lru_cache(maxsize=256)
def cell_table(grid: Grid) -> Int32[np.ndarray, "C patches_of_cell"]:
    """Patches of each cell, cells and patches row by row; -1 below and right of the grid. Read-only."""
    side = grid.cell
    table = np.full((grid.rows * side, grid.columns * side), _HOLE, np.int32)
    table[: grid.height, : grid.width] = np.arange(grid.patches, dtype=np.int32).reshape(grid.height, grid.width)
    table = table.reshape(grid.rows, side, grid.columns, side).transpose(0, 2, 1, 3)
    return read_only(table.reshape(grid.rows * grid.columns, side**2))


def row_table(grid: Grid, first_cell: int, num_cells: int) -> Int32[np.ndarray, "R"]:
    """Sources of a picture's embedding rows: start, then each row of cells with a newline behind it, then end.

    Args:
      first_cell: number of the picture's first cell in its batch.
      num_cells: number of cells of the batch, behind which the learned rows lie.
    """
    cells = first_cell + np.arange(grid.rows * grid.columns, dtype=np.int32).reshape(grid.rows, grid.columns)
    lines = np.pad(cells, ((0, 0), (0, 1)), constant_values=num_cells + NEWLINE)
    return np.concatenate([[num_cells + START], lines.ravel(), [num_cells + END]]).astype(np.int32)


def pack_pictures(
    items: Sequence[ProcessedItem], bucket: EncoderBucket, *, patch_values: int, cell: int
) -> DeepseekVisionInputs:
    """The inputs of one encoder call, freshly made numpy arrays of the bucket's shapes.

    Args:
      items: at most what the bucket holds in patches, pictures and rows, else EngineError.
      bucket: static sizes; the rest of it is padding.
      patch_values: uint8 values of one patch.
      cell: patches along one side of a cell.
    """
    tokens, contexts = bucket.key
    grids = [Grid(*item.plan.grid[1:], cell) for item in items]
    num_cells = cell_capacity(bucket, cell)
    _check(grids, bucket, num_cells)
    patches = np.zeros((tokens, patch_values), np.uint8)
    positions = np.zeros((tokens, 2), np.int32)
    cells = np.full((num_cells, cell**2), tokens, np.int32)
    rows = np.full(bucket.rows, num_cells + END, np.int32)
    offsets = np.zeros(contexts + 1, np.int32)
    patch = used_cells = row = 0
    for number, (item, grid) in enumerate(zip(items, grids, strict=True)):
        patches[patch : patch + grid.patches] = item.patches
        positions[patch : patch + grid.patches] = grid_positions(grid.height, grid.width, 1)
        table = cell_table(grid)
        np.copyto(cells[used_cells : used_cells + len(table)], table + np.int32(patch), where=table != _HOLE)
        rows[row : row + grid.span] = row_table(grid, used_cells, num_cells)
        patch, used_cells, row = patch + grid.patches, used_cells + len(table), row + grid.span
        offsets[number + 1 :] = patch
    return DeepseekVisionInputs(
        patches=patches,
        num_patches=np.array(patch, np.int32),
        positions=positions,
        cu_seqlens=offsets,
        cells=cells,
        rows=rows,
    )


def _check(grids: Sequence[Grid], bucket: EncoderBucket, num_cells: int) -> None:
    for name, needed, room in (
        ("patches", sum(grid.patches for grid in grids), bucket.key.total_tokens),
        ("contexts", len(grids), bucket.key.num_contexts),
        ("cells", sum(grid.rows * grid.columns for grid in grids), num_cells),
        ("rows", sum(grid.span for grid in grids), bucket.rows),
    ):
        if needed > room:
            raise EngineError(f"{len(grids)} pictures need {needed} {name}; the encoder bucket holds {room}")
