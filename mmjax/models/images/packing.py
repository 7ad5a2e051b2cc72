# SPDX-License-Identifier: Apache-2.0
"""Orders of patches in vision towers that merge blocks of them, and packing of several items into a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int, Int32, Shaped

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
def window_order(
    height: int, width: int, merge: int, side: int
) -> tuple[Int[np.ndarray, " blocks"], Int32[np.ndarray, " W"]]:
    """Merge blocks of a frame of `height` x `width` patches, window after window, and the patches of each. Read-only.

    A window has `side` x `side` merge blocks; windows start at the top left, row by row, and those on the far edges are
    cut. Blocks of a window keep their order.
    """
    rows, columns = height // merge, width // merge
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    return read_only(np.argsort(window, kind="stable")), read_only(np.bincount(window).astype(np.int32) * merge**2)


def pack_items(
    items: Sequence[ProcessedItem], bucket: EncoderBucket, *, patch_values: int, merge: int, window_side: int
) -> VisionInputs:
    """The inputs of one encoder call, freshly made numpy arrays of the bucket's shapes.

    With windows, the merge blocks of each frame are packed window after window.

    Args:
      items: at most what the bucket holds in patches, contexts and window rows, else EngineError.
      bucket: static sizes; the rest of it is padding.
      patch_values: uint8 values of one patch.
      merge: patches along one side of a merge block.
      window_side: merge blocks along one side of a window; 0 for towers without windows.
    """
    tokens, contexts = bucket.key
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
    row_order = np.arange(tokens // merge**2 if window_side else 0, dtype=np.int32)
    window_lengths: list[int] = []

    patch = 0
    for item in items:
        frames, height, width = item.plan.grid
        grid = grid_positions(height, width, merge)
        for frame in item.patches.reshape(frames, len(grid), patch_values):
            here = slice(patch, patch + len(grid))
            if window_side:
                order, sizes = window_order(height, width, merge, window_side)
                _take_blocks(frame, order, patches[here])
                _take_blocks(grid, order, positions[here])
                row = patch // merge**2
                row_order[row + order] = np.arange(row, row + len(order))
                window_lengths.extend(sizes)
            else:
                patches[here], positions[here] = frame, grid
            patch += len(grid)
    return VisionInputs(
        patches=patches,
        num_patches=np.array(patch, np.int32),
        positions=positions,
        cu_seqlens=_offsets(lengths, contexts),
        window_seqlens=_offsets(window_lengths, bucket.window_rows),
        row_order=row_order,
    )


def _take_blocks(
    source: Shaped[np.ndarray, "P values"], order: Int[np.ndarray, " blocks"], out: Shaped[np.ndarray, "P values"]
) -> None:
    """Writes the merge blocks of `source` to `out`, contiguous like it, in this order."""
    # Where an index may raise, numpy writes through a buffer.
    np.take(source.reshape(len(order), -1), order, axis=0, out=out.reshape(len(order), -1), mode="clip")


def _offsets(lengths: Sequence[int], segments: int) -> Int32[np.ndarray, "S+1"]:
    """Where each packed segment starts; trailing empty ones repeat the last offset."""
    offsets = np.zeros(segments + 1, np.int32)
    offsets[1 : len(lengths) + 1] = lengths
    return np.cumsum(offsets, dtype=np.int32)


def read_only(array: np.ndarray) -> np.ndarray:
    """The values in a contiguous array that nobody can change, as caches hand out."""
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array
