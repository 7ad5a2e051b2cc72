# SPDX-License-Identifier: Apache-2.0
"""Which size a picture is stretched to, and the largest there is. Sides are in pixels."""

from __future__ import annotations

import math

from mmjax.errors import RequestError


def stretched_size(height: int, width: int, factor: int, longest_edge: int) -> tuple[int, int]:
    """Sides, multiples of `factor`, by the rule of transformers' Pixtral processors.

    A picture with a side over `longest_edge` shrinks until it has none, sides rounded down; then both sides are
    rounded up. Raises RequestError where shrinking leaves nothing of the shorter side.
    """
    if min(height, width) < 1:
        raise RequestError(f"a picture needs at least one pixel a side, got {height} x {width} (height x width)")
    ratio = max(height / longest_edge, width / longest_edge)
    rows, columns = height, width
    if ratio > 1:
        rows, columns = math.floor(height / ratio), math.floor(width / ratio)
    if min(rows, columns) < 1:
        raise RequestError(
            f"a picture {height} high and {width} wide is too thin: shrunk to {longest_edge} pixels, its shorter side "
            "is less than one"
        )
    return math.ceil(rows / factor) * factor, math.ceil(columns / factor) * factor


def largest_side(factor: int, longest_edge: int) -> int:
    """The longest side that `stretched_size` gives; squares reach it twice."""
    return math.ceil(longest_edge / factor) * factor
