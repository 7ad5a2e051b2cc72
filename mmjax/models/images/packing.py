# SPDX-License-Identifier: Apache-2.0
"""Index tables of vision towers that merge blocks of patches, and packing of several items into a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int32

from mmjax.errors import EngineError
from mmjax.inputs.items import EncoderBucket, ProcessedItem
from mmjax.models.vision_inputs import VisionInputs


@lru_cache(maxsize=256)
def grid_positions(height: int, width: int, merge: int) -> Int32[np.ndarray, "P 2"]:
    """Row and column of each patch of a frame of `height` x `width` patches, in merge-block order. Read-only."""
    grid = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1).astype(np.int32)
    blocks = grid.reshape(height // merge, merge, width // merge, merge, 2).transpose(0, 2, 1, 3, 4)
    return read_only(blocks.reshape(-1, 2))


@lru_cache(maxsize=256)
def window_table(height: int, width: int, merge: int, side: int) -> Int32[np.ndarray, "W C"]:
    """Patches of each window of a frame of `height` x `width` patches, ascending; holes, at the end, are -1. Read-only.

    A window has `side` x `side` merge blocks; windows start at the top left, and those on the far edges are cut.
    """
    rows, columns = height // merge, width // merge
    down, across = -(-rows // side), -(-columns // side)
    last = rows * columns  # stands for a hole while sorting
    blocks = np.full((down * side, across * side), last, np.int32)
    blocks[:rows, :columns] = np.arange(last, dtype=np.int32).reshape(rows, columns)
    windows = blocks.reshape(down, side, across, side).transpose(0, 2, 1, 3).reshape(down * across, side * side)
    windows = np.sort(windows, axis=1)
    patches = windows[:, :, None] * merge**2 + np.arange(merge**2, dtype=np.int32)
    patches[windows == last] = -1
    return read_only(patches.reshape(down * across, -1))


def pack_items(
    items: Sequence[ProcessedItem], bucket: EncoderBucket, *, patch_values: int, merge: int, window_side: int
) -> VisionInputs:
    """The inputs of one encoder call, freshly made numpy arrays of the bucket's shapes.

    Args:
      items: at most what the bucket holds in patches, contexts and window rows, else EngineError.
      bucket: static sizes; the rest of it is padding.
      patch_values: uint8 values of one patch.
      merge: patches along one side of a merge block.
      window_side: merge blocks along one side of a window; 0 for towers without windows.
    """
    tokens, contexts = bucket.key
    capacity = (window_side * merge) ** 2
    lengths = [length for item in items for length in item.plan.contexts]
    windows = sum(item.plan.windows for item in items) if window_side else 0
    for name, needed, room in (
        ("patches", sum(lengths), tokens),
        ("contexts", len(lengths), contexts),
        ("window rows", windows, bucket.window_rows),
    ):
        if needed > room:
            raise EngineError(f"{len(items)} items need {needed} {name}; the encoder bucket holds {room}")
    patches = np.empty((tokens, patch_values), np.uint8)
    patches[sum(lengths) :] = 0
    positions = np.zeros((tokens, 2), np.int32)
    table = np.full((bucket.window_rows, capacity), tokens, np.int32)

    patch = row = 0
    for item in items:
        frames, height, width = item.plan.grid
        patches[patch : patch + len(item.patches)] = item.patches
        for _ in range(frames):
            positions[patch : patch + height * width] = grid_positions(height, width, merge)
            if window_side:
                frame = window_table(height, width, merge, window_side)
                target = table[row : row + len(frame)]
                np.copyto(target, frame + np.int32(patch), where=frame >= 0)
                row += len(frame)
            patch += height * width
    offsets = np.full(contexts + 1, patch, np.int32)
    offsets[0] = 0
    offsets[1 : len(lengths) + 1] = np.cumsum(lengths)
    return VisionInputs(
        patches=patches,
        num_patches=np.array(patch, np.int32),
        positions=positions,
        cu_seqlens=offsets,
        window_index=table,
    )


def read_only(array: np.ndarray) -> np.ndarray:
    """The values in a contiguous array that nobody can change, as caches hand out."""
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array
