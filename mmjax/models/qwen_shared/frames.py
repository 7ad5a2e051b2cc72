# SPDX-License-Identifier: Apache-2.0
"""Which frames of a clip the Qwen2-VL video processor keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int64

from mmjax.errors import RequestError


def sample_frames(
    total: int, rate: float, options: Mapping[str, Any], temporal_patch_size: int
) -> Int64[np.ndarray, "frames"]:
    """Indices of the frames to keep, by the rule of transformers' `Qwen2VLVideoProcessor.sample_frames`.

    Args:
      total: frames of the source, at least one.
      rate: frames a second of the source.
      options: resolved; of them `num_frames`, or else `fps` (frames a second to keep) with `min_frames` and
        `max_frames`. Neither: every frame.

    Where the reference fails because fewer frames remain than one temporal step, up to one step is kept.
    """
    step = temporal_patch_size
    if options["num_frames"] is not None:
        count = round(options["num_frames"] / step) * step
    elif options["fps"] is not None:
        most = math.floor(min(options["max_frames"], total) / step) * step
        wanted = total / rate * options["fps"]
        count = math.floor(min(max(wanted, options["min_frames"]), most, total) / step) * step
    else:
        return np.arange(total)
    count = max(count, min(step, total))
    if count > total:
        raise RequestError(
            f"asked for {count} frames of a clip that has {total}; lower num_frames or fps, "
            "or set do_sample_frames to false to take them all"
        )
    stride = total / count
    # The reference counts strides in double and stores float32 before it truncates.
    return (np.arange(math.ceil(total / stride)) * stride).astype(np.float32).astype(np.int64)
