# SPDX-License-Identifier: Apache-2.0
"""Which sizes the Qwen processors resize to, and bounds over all of them. Sides are in pixels or in merge blocks."""

from __future__ import annotations

import math
from functools import lru_cache

from mmjax.errors import RequestError

MAX_ASPECT = 200


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Sides, multiples of `factor`, with about the same aspect and an area between the two limits.

    The rule of transformers' Qwen2-VL processors: halves round to even, a picture over the limit is rounded down,
    one under the limit is rounded up. Very thin pictures may exceed a small `max_pixels`, see `most_blocks`.
    Raises RequestError if one side is more than 200 times the other.
    """
    if min(height, width) < 1:
        raise RequestError(f"a picture needs at least one pixel a side, got {height} x {width} (height x width)")
    if max(height, width) > MAX_ASPECT * min(height, width):
        ratio = max(height, width) / min(height, width)
        raise RequestError(
            f"aspect ratio {ratio:g} of a picture {height} high and {width} wide; at most {MAX_ASPECT} is supported"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def most_blocks(factor: int, min_pixels: int, max_pixels: int) -> int:
    """The most merge blocks (`factor` x `factor` pixels) that `smart_resize` gives any picture."""
    block = factor * factor
    # Rounding down keeps to the limit, unless the short side had to be raised to one block.
    most = max(max_pixels // block, math.floor(math.sqrt(MAX_ASPECT * max_pixels) / factor))
    # Rounding up: with a short side of n blocks the other is at most what an exact short side of n - 1 leaves. One
    # block more than that, for floating-point error in `smart_resize`.
    most = max(most, math.floor(math.sqrt(MAX_ASPECT * min_pixels) / factor) + 1)
    for short in range(2, math.floor(math.sqrt(min_pixels) / factor) + 2):
        most = max(most, short * (min_pixels // (block * (short - 1)) + 1))
    return most


def fewest_blocks(factor: int, min_pixels: int, max_pixels: int) -> int:
    """A number of merge blocks that no picture falls below."""
    largest = max_pixels / (factor * factor)
    fewest = math.ceil(min_pixels / (factor * factor))
    # Rounding down may lose up to half of either side, which matters if the two limits are close.
    for short in range(1, math.floor(math.sqrt(largest)) + 1):
        fewest = min(fewest, short * max(1, math.ceil(largest / (short + 1)) - 1))
    return max(1, fewest)


def count_windows(rows: int, columns: int, side: int) -> int:
    """Windows of `side` x `side` merge blocks that cover a frame; those on the far edges may be partial."""
    return -(-rows // side) * -(-columns // side)


@lru_cache(maxsize=8)
def worst_window_ratio(side: int, fewest: int, most: int) -> tuple[int, int]:
    """(windows, blocks) of the frame of `fewest`..`most` merge blocks with the most windows a block."""
    worst = (0, 1)
    for rows in range(1, most + 1):
        least = -(-fewest // rows)
        # For given rows the worst frames are the narrowest one and the next that just opens another window.
        for columns in (least, (least - 1 + side - 1) // side * side + 1):
            windows, blocks = count_windows(rows, columns, side), rows * columns
            if blocks <= most and windows * worst[1] > worst[0] * blocks:
                worst = (windows, blocks)
    return worst
