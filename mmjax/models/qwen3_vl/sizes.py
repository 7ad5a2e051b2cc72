# SPDX-License-Identifier: Apache-2.0
"""Which sizes the Qwen3-VL video processor resizes to: limits hold for a clip as a whole, its frames taken together."""

from __future__ import annotations

import math

from mmjax.errors import RequestError
from mmjax.models.qwen_shared.sizes import MAX_ASPECT


def clip_resize(
    frames: int, height: int, width: int, *, factor: int, temporal: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Sides of every frame, multiples of `factor`, so that all frames have between `min_pixels` and `max_pixels`.

    The rule of transformers' Qwen3-VL `smart_resize`: sides below the factor are stretched before anything is judged,
    whole temporal steps count against the limits (halves round to even), and the frames themselves in the scale.
    Fewer frames than one step, which transformers refuses, count as the step that they are repeated to fill.

    Raises:
      RequestError: one side more than 200 times the other.
    """
    frames = max(frames, temporal)
    if min(height, width) < 1:
        raise RequestError(f"a frame needs at least one pixel a side, got {height} x {width} (height x width)")
    if height < factor or width < factor:
        stretch = max(factor / height, factor / width)
        height, width = int(height * stretch), int(width * stretch)
    if max(height, width) / min(height, width) > MAX_ASPECT:
        ratio = max(height, width) / min(height, width)
        raise RequestError(
            f"aspect ratio {ratio:g} of frames {height} high and {width} wide; at most {MAX_ASPECT} is supported"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    area = _counted_frames(frames, temporal) * rows * columns
    if area > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def most_clip_blocks(*, factor: int, temporal: int, max_pixels: int, max_frames: int) -> int:
    """The most merge blocks, over all temporal steps, of a clip of at most `max_frames` that keeps to `max_pixels`.

    Frames so thin that their short side had to be raised to one block may not keep to it.
    """

    def blocks(frames: int) -> int:
        counted = min(frames, _counted_frames(frames, temporal))
        return -(-frames // temporal) * max(1, max_pixels // (counted * factor * factor))

    return max(blocks(frames) for frames in range(temporal, max(max_frames, temporal) + 1))


def _counted_frames(frames: int, temporal: int) -> int:
    """Frames as they count against the limits."""
    return round(frames / temporal) * temporal
