# SPDX-License-Identifier: Apache-2.0
"""How a square table of learned positions is resampled to each item's grid, and the packing of items into a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from mmjax.inputs.items import EncoderBucket, ProcessedItem
from mmjax.models.images.packing import grid_positions, pack_items
from mmjax.models.qwen3_vl.vision_inputs import TAPS, Qwen3VLVisionInputs


class TableTaps(NamedTuple):
    """Which entries of the position table each patch mixes, and how much of each."""

    index: Int32[np.ndarray, "P 4"]
    weight: Float32[np.ndarray, "P 4"]


@lru_cache(maxsize=64)  # half a megabyte each for the largest pictures
def table_taps(height: int, width: int, merge: int, side: int) -> TableTaps:
    """Taps of a frame of `height` x `width` patches into a table of `side` x `side`, in merge-block order. Read-only.

    The corners of the table and of the frame coincide: row i of the frame lies at i * (side - 1) / (height - 1). The
    four taps are (upper, lower) x (left, right). All in float32, operation for operation as transformers'
    `get_vision_interpolation_indices_and_weights`.
    """
    rows, row_weights = _axis_taps(height, side)
    columns, column_weights = _axis_taps(width, side)
    row, column = grid_positions(height, width, merge).T
    index = rows[row][:, :, None] * side + columns[column][:, None, :]
    weight = row_weights[row][:, :, None] * column_weights[column][:, None, :]
    taps = TableTaps(index.reshape(-1, TAPS).astype(np.int32), weight.reshape(-1, TAPS))
    for array in taps:
        array.flags.writeable = False
    return taps


def _axis_taps(size: int, side: int) -> tuple[Int32[np.ndarray, "size 2"], Float32[np.ndarray, "size 2"]]:
    """The two entries of an axis of the table on either side of each row (or column) of the frame, and their shares."""
    source = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    below = np.floor(source)
    steps = np.arange(2, dtype=np.float32)
    entries = np.clip(below[:, None].astype(np.int32) + steps.astype(np.int32), 0, side - 1)
    distance = np.abs(source[:, None] - below[:, None] - steps)
    return entries, np.maximum(np.float32(1.0) - distance, np.float32(0.0))


def pack_with_taps(
    items: Sequence[ProcessedItem], bucket: EncoderBucket, *, patch_values: int, merge: int, table_side: int
) -> Qwen3VLVisionInputs:
    """The inputs of one encoder call, freshly made numpy arrays of the bucket's shapes; see `pack_items`.

    Args:
      table_side: entries along one side of the position table.
    """
    packed = pack_items(items, bucket, patch_values=patch_values, merge=merge, window_side=0)
    index = np.zeros((bucket.key.total_tokens, TAPS), np.int32)
    weight = np.zeros((bucket.key.total_tokens, TAPS), np.float32)
    patch = 0
    for item in items:
        frames, height, width = item.plan.grid
        taps = table_taps(height, width, merge, table_side)
        for _ in range(frames):
            index[patch : patch + height * width] = taps.index
            weight[patch : patch + height * width] = taps.weight
            patch += height * width
    return Qwen3VLVisionInputs(**vars(packed), table_index=index, table_weight=weight)
