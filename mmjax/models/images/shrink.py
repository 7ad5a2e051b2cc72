# SPDX-License-Identifier: Apache-2.0
"""The remark that callers get where a picture loses much of its detail."""

from __future__ import annotations

_STRONG_SHRINK = 2  # times a side


def shrink_warnings(before: tuple[int, int], after: tuple[int, int], option: str) -> tuple[str, ...]:
    """One warning, none if no side shrinks to less than half.

    Args:
      before, after: (height, width) in pixels.
      option: the processor option that a caller can raise.
    """
    if max(old / new for old, new in zip(before, after, strict=True)) <= _STRONG_SHRINK:
        return ()
    old, new = (f"{height} x {width}" for height, width in (before, after))
    return (f"{old} pixels are shrunk to {new} (height x width); raise {option} to keep small details",)
