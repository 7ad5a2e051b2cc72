# SPDX-License-Identifier: Apache-2.0
"""Embedding rows supplied by callers in place of pixels: checked before they come near the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float32

from mmjax.errors import RequestError


def accept_embeddings(
    value: Any, width: int, rows: int | None = None, item: int | None = None
) -> Float32[np.ndarray, "R E"]:
    """One item's rows as float32; every floating type is cast, nothing else is taken.

    Args:
      value: an array [rows, width] (numpy, jax, or torch on the CPU).
      width: of one row, deepstack levels included.
      rows: how many the item's size calls for, if known.

    Raises:
      RequestError: naming what was expected and what came: rank, width, rows, type, or values that are not finite.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"embeddings can't be read as an array: {error}", item=item) from error
    expected = f"[{'rows' if rows is None else rows}, {width}]"
    if array.ndim != 2 or array.shape[1] != width or array.shape[0] == 0 or rows not in (None, array.shape[0]):
        raise RequestError(f"embeddings must have shape {expected}, got {list(array.shape)}", item=item)
    # Types that numpy does not know, such as bfloat16, have kind "V" and cast all the same.
    if array.dtype.kind not in "fV" or array.dtype.fields is not None:
        raise RequestError(f"embeddings must be floating point, got {array.dtype}", item=item)
    cast = array.astype(np.float32)
    if not np.isfinite(cast).all():
        raise RequestError("embeddings hold values that are not finite", item=item)
    return cast
