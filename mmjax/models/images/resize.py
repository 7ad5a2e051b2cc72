# SPDX-License-Identifier: Apache-2.0
"""Antialiased resize of uint8 images, equal value for value to torchvision's on a CPU, in numpy and scipy.

The reference works in fixed point: weights in double, rounded to 16 bits with as many fraction bits as the largest
weight allows; the horizontal pass first; 8-bit rounding after each pass. All of its sums are integers, so they can be
had from floating-point products, which sparse matrices do fast, as long as no sum outgrows the mantissa.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from jaxtyping import UInt8
from scipy import sparse

Filter = Literal["bicubic", "bilinear"]

_SUPPORT = {"bicubic": 2.0, "bilinear": 1.0}
_MAX_FRACTION_BITS = 22
_STRIP_ROWS = 32  # image rows of one horizontal product: the operands stay in the second-level cache
_STRIP_COLUMNS = 256  # image columns of one vertical product


@dataclass(frozen=True)
class _Pass:
    """One axis of a resize: out = clip(floor(matrix @ (x - 128) + offset)).

    Centring the bytes halves the largest sum. `offset` puts back what centring took and the half of the rounding;
    weights are scaled by 2**-bits, which is exact.
    """

    matrix: sparse.csr_matrix  # [out, in]
    offset: np.ndarray  # [out, 1], same dtype


def resize(
    image: UInt8[np.ndarray, "height width channels"], height: int, width: int, kind: Filter = "bicubic"
) -> UInt8[np.ndarray, "channels {height} {width}"]:
    """Resized image in planes (channels first); a view of `image` if it has that size already.

    Equals `torchvision.transforms.v2.functional.resize(..., antialias=True)` on a uint8 CPU tensor. An axis that keeps
    its size is not filtered.
    """
    rows, columns, _ = image.shape
    planes = image.transpose(2, 0, 1)
    if columns != width:
        planes = _horizontal(image, _weights(columns, width, kind))
    if rows != height:
        planes = _vertical(planes, _weights(rows, height, kind))
    return planes


def _horizontal(
    image: UInt8[np.ndarray, "height in channels"], step: _Pass
) -> UInt8[np.ndarray, "channels height out"]:
    rows, columns, channels = image.shape
    out = np.empty((channels, rows, step.matrix.shape[0]), np.uint8)
    buffer = np.empty((columns, channels, min(_STRIP_ROWS, rows)), step.offset.dtype)
    for start in range(0, rows, _STRIP_ROWS):
        strip = _centred(image[start : start + _STRIP_ROWS])
        operand = buffer[:, :, : len(strip)]
        np.copyto(operand, strip.transpose(1, 2, 0))
        # A last, shorter strip makes the reshape copy; all others are views.
        result = _apply(step, operand.reshape(columns, -1))
        np.copyto(
            out[:, start : start + len(strip)],
            result.reshape(-1, channels, len(strip)).transpose(1, 2, 0),
            casting="unsafe",
        )
    return out


def _vertical(planes: UInt8[np.ndarray, "channels in width"], step: _Pass) -> UInt8[np.ndarray, "channels out width"]:
    channels, _, width = planes.shape
    out = np.empty((channels, step.matrix.shape[0], width), np.uint8)
    for plane, target in zip(planes, out, strict=True):
        for start in range(0, width, _STRIP_COLUMNS):
            columns = slice(start, start + _STRIP_COLUMNS)
            operand = _centred(plane[:, columns]).astype(step.offset.dtype, order="C")
            np.copyto(target[:, columns], _apply(step, operand), casting="unsafe")
    return out


def _centred(x: np.ndarray) -> np.ndarray:
    """x - 128 as int8."""
    return (x ^ np.uint8(128)).view(np.int8)


def _apply(step: _Pass, operand: np.ndarray) -> np.ndarray:
    """[out, n] floats in [0, 255]; their integer parts are the result."""
    result = step.matrix @ operand
    result += step.offset
    return np.clip(result, 0, 255, out=result)


@lru_cache(maxsize=64)
def _weights(size_in: int, size_out: int, kind: Filter) -> _Pass:
    first, count, real = _filter_rows(size_in, size_out, kind)
    largest, bits = real.max(), 0
    while bits < _MAX_FRACTION_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    fixed = np.trunc(real * (1 << bits) + np.where(real < 0, -0.5, 0.5))

    taps = np.arange(real.shape[1])
    used = taps < count[:, None]
    columns = (first[:, None] + taps)[used]
    starts = np.concatenate([[0], np.cumsum(count)])
    rounding = (1 << bits) // 2 + 128 * (fixed.sum(1) - (1 << bits))
    # float32 holds integers below 2**24; sums are counted in units of 2**-bits, and the offset adds up to 2**8 of them.
    span = np.abs(fixed).sum(1) * 128 + np.abs(rounding)
    dtype = np.float32 if span.max() < 1 << 24 and bits <= 16 else np.float64
    matrix = sparse.csr_matrix(
        ((fixed[used] / (1 << bits)).astype(dtype), columns.astype(np.int32), starts.astype(np.int32)),
        shape=(size_out, size_in),
    )
    return _Pass(matrix, (128 + rounding / (1 << bits)).astype(dtype)[:, None])


def _filter_rows(size_in: int, size_out: int, kind: Filter) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First input pixel [out], number of taps [out] and normalised weights [out, taps], zeros past the number.

    Operations and their order are the reference's, in double precision.
    """
    scale = size_in / size_out
    support = _SUPPORT[kind] * max(scale, 1.0)
    center = scale * (np.arange(size_out) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(np.int64), size_in)
    most = math.ceil(support) * 2 + 1
    count = np.clip(last - first, 0, most)

    taps = np.arange(count.max())
    x = np.abs((taps + first[:, None] - center[:, None] + 0.5) * (1.0 / scale if scale >= 1.0 else 1.0))
    weights = np.where(taps < count[:, None], _bicubic(x) if kind == "bicubic" else np.maximum(1.0 - x, 0.0), 0.0)
    return first, count, weights / np.cumsum(weights, axis=1)[:, -1:]


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution kernel with a = -1/2, for x >= 0."""
    a = -0.5
    inner = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    outer = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, inner, np.where(x < 2.0, outer, 0.0))
