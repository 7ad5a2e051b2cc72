# SPDX-License-Identifier: Apache-2.0
"""Order of the patches of a picture that need not be whole merge blocks, and packing of several pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from jaxtyping import Int

from mmjax.inputs.items import EncoderBucket, ProcessedItem
from mmjax.models.images.packing import pack_items, read_only
from mmjax.models.vision_inputs import VisionInputs


@lru_cache(maxsize=256)
def patch_order(height: int, width: int, merge: int) -> Int[np.ndarray, "P"]:
    """Row-major places of the patches of a grid: whole merge blocks, block by block, then all others. Read-only."""
    places = np.arange(height * width).reshape(height, width)
    rows, columns = height // merge, width // merge
    whole = places[: rows * merge, : columns * merge]
    blocks = whole.reshape(rows, merge, columns, merge).swapaxes(1, 2)
    right, below = places[: rows * merge, columns * merge :], places[rows * merge :]
    return read_only(np.concatenate([part.reshape(-1) for part in (blocks, right, below)]))


def pack_pictures(
    items: Sequence[ProcessedItem], bucket: EncoderBucket, *, patch_values: int, merge: int
) -> VisionInputs:
    """The inputs of one encoder call, freshly made numpy arrays; EngineError where the bucket is too small.

    Every picture starts at a multiple of `merge**2` patches; `row_order` [R] names the blocks that are rows, of all.

    Args:
      items: patches as in `patch_order`, padded to that multiple.
    """
    lines = [replace(item, plan=replace(item.plan, grid=(1, 1, item.plan.encoder_tokens))) for item in items]
    inputs = pack_items(lines, bucket, patch_values=patch_values, merge=1, window_side=0)
    inputs.positions[:] = 0
    row_order = np.zeros(bucket.rows, np.int32)
    patch = row = 0
    for plan in (item.plan for item in items):
        _, height, width = plan.grid
        places = patch_order(height, width, merge)
        inputs.positions[patch : patch + len(places)] = np.stack(np.divmod(places, width), axis=1)
        row_order[row : row + plan.rows] = patch // merge**2 + np.arange(plan.rows)
        patch, row = patch + plan.encoder_tokens, row + plan.rows
    return inputs.replace(row_order=row_order)
