# SPDX-License-Identifier: Apache-2.0
"""A picture in the terminal: two pixels a character, in 24-bit colour."""

from __future__ import annotations

import shutil

import numpy as np
from jaxtyping import UInt8
from PIL import Image


def render(rgb: UInt8[np.ndarray, "H W 3"], *, max_width: int = 48, max_rows: int = 18) -> str:
    """ANSI text that shows a picture, at most `max_width` columns and `max_rows` lines."""
    height, width = rgb.shape[:2]
    columns = min(max_width, shutil.get_terminal_size().columns, width)
    scale = min(columns / width, 2 * max_rows / height)
    size = (max(1, round(width * scale)), max(2, round(height * scale) // 2 * 2))
    pixels = np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.BOX))
    lines = []
    for upper, lower in zip(pixels[0::2], pixels[1::2], strict=True):
        cells = [
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀" for a, b in zip(upper, lower, strict=True)
        ]
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)
