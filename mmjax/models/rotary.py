# SPDX-License-Identifier: Apache-2.0
"""Which position axis turns which rotary pair of a head, and how fast: constants, made on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int


class RotaryPairs(NamedTuple):
    """`axis`: the position axis of each pair. `frequency`: radians per position."""

    axis: Int[np.ndarray, "half_D"]
    frequency: Float32[np.ndarray, "half_D"]


def inverse_frequencies(dim: int, theta: float) -> Float32[np.ndarray, "half_D"]:
    """theta^(-2i/dim), with exponent, power and reciprocal each rounded to float32 as in PyTorch."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1.0) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


def text_pairs(head_dim: int, theta: float, sections: tuple[int, ...], *, interleaved: bool = False) -> RotaryPairs:
    """A text decoder's; `sections` says how many pairs follow each axis, none that there is one axis.

    Pairs come in one block an axis, or `interleaved`: axes take turns for as long as they have pairs left, and those
    of the first axis fill what remains (Qwen3-VL).
    """
    axis = np.repeat(np.arange(len(sections)), sections) if sections else np.zeros(head_dim // 2, np.int64)
    if interleaved:
        axis = np.zeros(head_dim // 2, np.int64)
        for other in range(1, len(sections)):
            axis[other : len(sections) * sections[other] : len(sections)] = other
    return RotaryPairs(axis, inverse_frequencies(head_dim, theta))


def axial_pairs(head_dim: int, theta: float) -> RotaryPairs:
    """A vision tower's: the first half of the pairs turns with the row, the second with the column."""
    frequency = inverse_frequencies(head_dim // 2, theta)
    return RotaryPairs(np.repeat(np.arange(2), len(frequency)), np.tile(frequency, 2))


def alternating_pairs(head_dim: int, theta: float) -> RotaryPairs:
    """A Pixtral tower's: as `axial_pairs`, but row and column share one series and take its frequencies in turn."""
    frequency = inverse_frequencies(head_dim, theta)
    return RotaryPairs(np.repeat(np.arange(2), len(frequency) // 2), np.concatenate([frequency[::2], frequency[1::2]]))
