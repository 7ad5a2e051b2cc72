# SPDX-License-Identifier: Apache-2.0
"""A picture as patches: resized by Pillow, whose default filter is what defines the pixels, and padded with grey."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image, ImageOps

from mmjax.errors import RequestError
from mmjax.models.deepseek_v4_1.grid import Grid, GridRule
from mmjax.models.images.normalisation import CHANNELS

GREY = (127, 127, 127)


def fit(
    rgb: UInt8[np.ndarray, "height width 3"], grid: Grid, rule: GridRule
) -> UInt8[np.ndarray, "grid_height grid_width 3"]:
    """The picture at the grid's size: its shape is kept and the rest is grey, but one that is too flat is squeezed.

    Raises RequestError if a side would round to 0 pixels.
    """
    height, width = rgb.shape[:2]
    size = (grid.width * rule.patch, grid.height * rule.patch)
    image = Image.fromarray(rgb)
    if rule.max_ratio is not None and width >= rule.max_ratio * height:
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    if round(min(height / width * size[0], size[1])) == 0 or round(min(width / height * size[1], size[0])) == 0:
        raise RequestError(f"a picture of {height} x {width} pixels is too thin to be shown in {size[1]} x {size[0]}")
    return np.asarray(ImageOps.pad(image, size, Image.Resampling.BICUBIC, color=GREY))


def patches(rgb: UInt8[np.ndarray, "height width 3"], grid: Grid, rule: GridRule) -> UInt8[np.ndarray, "P values"]:
    """Patches row by row, each laid out (channel, row, column)."""
    pixels = fit(rgb, grid, rule)
    pixels = pixels.reshape(grid.height, rule.patch, grid.width, rule.patch, CHANNELS)
    return np.ascontiguousarray(pixels.transpose(0, 2, 4, 1, 3)).reshape(grid.patches, -1)


def byte_table() -> Float32[np.ndarray, "3 256"]:
    """What the tower sees of each byte: scaled to 0..1, then to -1..1, each operation rounded to float32."""
    values = (np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    return np.tile(values, (CHANNELS, 1))
