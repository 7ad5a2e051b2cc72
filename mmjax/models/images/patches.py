# SPDX-License-Identifier: Apache-2.0
"""Pictures cut to patches in the order that towers with merge blocks take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from mmjax.errors import RequestError
from mmjax.models.images.normalisation import CHANNELS


def check_pixels(what: str, pixels: np.ndarray, axes: Sequence[str]) -> None:
    """Raises RequestError unless `pixels` is uint8 with these axes and RGB last."""
    if pixels.dtype != np.uint8 or pixels.ndim != len(axes) + 1 or pixels.shape[-1] != CHANNELS:
        raise RequestError(
            f"{what} must be uint8 [{', '.join(axes)}, {CHANNELS}], got {pixels.dtype} {list(pixels.shape)}"
        )


def merge_blocks(
    planes: UInt8[np.ndarray, "channels height width"], patch: int, merge: int
) -> UInt8[np.ndarray, "rows columns {merge} {merge} channels {patch} {patch}"]:
    """A view of a picture as blocks of `merge` x `merge` patches, row by row; sides are multiples of a block's."""
    channels, height, width = planes.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    return planes.reshape(channels, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
