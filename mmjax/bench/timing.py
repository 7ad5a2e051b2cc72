# SPDX-License-Identifier: Apache-2.0
"""Timing: warm up, wait for the device, many rounds, medians."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax


def measure(call: Callable[[int], Any], repeat: int, *, warm_up: int = 2, per_call: int = 1) -> list[float]:
    """Seconds of each of `repeat` rounds; a round ends when what `call(round)` returned is there.

    Args:
      per_call: pieces of work in one call; times are those of one piece.
    """
    for index in range(warm_up):
        jax.block_until_ready(call(index))
    times = []
    for index in range(warm_up, warm_up + repeat):
        start = time.perf_counter()
        jax.block_until_ready(call(index))
        times.append((time.perf_counter() - start) / per_call)
    return times
