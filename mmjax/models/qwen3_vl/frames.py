# SPDX-License-Identifier: Apache-2.0
"""Which frames of a clip the Qwen3-VL video processor keeps, and the time of each temporal step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from mmjax.errors import RequestError


def spread_frames(total: int, rate: float, options: Mapping[str, Any]) -> Int64[np.ndarray, "frames"]:
    """Indices of the frames to keep, spread evenly from the first to the last.

    The rule of transformers' `Qwen3VLVideoProcessor.sample_frames`.

    Args:
      total: frames of the source, at least one.
      rate: frames a second of the source.
      options: resolved; of them `num_frames`, or else `fps` (frames a second to keep) with `min_frames` and
        `max_frames`.
    """
    if options["num_frames"] is not None:
        count = options["num_frames"]
        if count > total:
            raise RequestError(
                f"asked for {count} frames of a clip that has {total}; lower num_frames, "
                "or set do_sample_frames to false to take them all"
            )
    else:
        wanted = int(total / rate * options["fps"])
        count = min(max(wanted, options["min_frames"]), options["max_frames"], total)
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def step_seconds(frames: Sequence[int], rate: float, temporal: int) -> list[float]:
    """When each temporal step is seen: the mean of the times of its first and its last frame.

    Args:
      frames: source indices of the frames that are kept; the last fills up the last step.
      rate: frames a second of the source.
      temporal: frames of a step.
    """
    padded = [*frames, *[frames[-1]] * (-len(frames) % temporal)]
    times = [index / rate for index in padded]
    return [(times[i] + times[i + temporal - 1]) / 2 for i in range(0, len(times), temporal)]
