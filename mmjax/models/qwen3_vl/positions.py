# SPDX-License-Identifier: Apache-2.0
"""Three-axis rotary positions of a whole prompt: every temporal step of a clip counts as a picture of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int32

from mmjax.inputs.items import ItemPlan
from mmjax.models.qwen_shared.positions import mrope_positions


def step_positions(
    length: int, spans: Sequence[tuple[int, ItemPlan]], merge: int
) -> tuple[Int32[np.ndarray, "3 S"], int]:
    """Positions of a prompt of `length` tokens, and the delta; arguments as in `mrope_positions`.

    What stands between the steps of a clip, such as their times, is text.
    """
    steps = [step for start, plan in spans for step in _steps(start, plan)]
    return mrope_positions(length, steps, merge, tokens_per_second=None)


def _steps(start: int, plan: ItemPlan) -> list[tuple[int, ItemPlan]]:
    """Index of the first row and a one-step plan of every temporal step of the span that starts at `start`."""
    frames, height, width = plan.grid
    step = replace(plan, grid=(1, height, width))
    rows = np.flatnonzero(plan.span_embed)
    return [(start + int(offset), step) for offset in rows[:: len(rows) // frames]]
