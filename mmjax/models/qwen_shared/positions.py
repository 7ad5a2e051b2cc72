# SPDX-License-Identifier: Apache-2.0
"""Three-axis rotary positions (time, row, column) of a whole prompt, as transformers' `get_rope_index` gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from mmjax.inputs.items import ItemPlan


def mrope_positions(
    length: int, spans: Sequence[tuple[int, ItemPlan]], merge: int, tokens_per_second: float | None
) -> tuple[Int32[np.ndarray, "3 S"], int]:
    """Positions of a prompt of `length` tokens, and the delta: largest position + 1 - length.

    Text advances all axes by one. An item that starts at position s has s + row and s + column of its merged grid, and
    s + time; after it, text goes on at s + the longer side of the grid, wherever time got to.

    Args:
      length: S, tokens of the expanded prompt.
      spans: (index of the first token, plan) of each item, ascending.
      merge: patches along one side of a merge block.
      tokens_per_second: time of a clip's step k is floor(k * seconds_per_step * tokens_per_second), in float32;
        None: it is k.
    """
    positions = np.empty((3, length), np.int32)
    token = position = 0
    for start, plan in spans:
        positions[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        frames, height, width = plan.grid
        rows, columns = height // merge, width // merge
        token = start + frames * rows * columns
        item = positions[:, start:token].reshape(3, frames, rows, columns)
        item[0] = _times(plan, tokens_per_second)[:, None, None]
        item[1] = np.arange(rows)[:, None]
        item[2] = np.arange(columns)
        item += position
        position += max(rows, columns)
    positions[:, token:] = np.arange(position, position + length - token)
    return positions, int(positions.max(initial=-1)) + 1 - length


def _times(plan: ItemPlan, tokens_per_second: float | None) -> Int32[np.ndarray, "time"]:
    steps = np.arange(plan.grid[0])
    if tokens_per_second is not None and plan.seconds_per_step is not None:
        interval = np.float32(tokens_per_second) * np.float32(plan.seconds_per_step)
        steps = steps.astype(np.float32) * interval
    return steps.astype(np.int32)
