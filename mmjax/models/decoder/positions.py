# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of decoders with one axis."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32


def plain_positions(length: int) -> tuple[Int32[np.ndarray, "1 S"], int]:
    """0, 1, 2, ... over the whole prompt, rows of items included; decoding adds a delta of 0."""
    return np.arange(length, dtype=np.int32)[None], 0
