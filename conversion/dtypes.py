# SPDX-License-Identifier: Apache-2.0
"""Weight dtypes: what we compute in, and how stored values become that."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mmjax.errors import ConfigError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
COMPUTE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}


def compute_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name. Raises ConfigError for one that is neither float32 nor bfloat16."""
    if name not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype={name!r}: weights are {' or '.join(COMPUTE_DTYPES)}")
    return COMPUTE_DTYPES[name]


def cast_into(out: np.ndarray, values: np.ndarray) -> None:
    """Writes `values` into `out` in `out`'s dtype.

    Widening is exact. Narrowing rounds to the nearest, ties to even, as torch does; float16 to bfloat16 gives up three
    bits of precision and overflows nowhere.
    """
    if values.dtype == BFLOAT16 and out.dtype == np.float32:
        # A bfloat16 is the upper half of a float32; shifting is ten times faster than ml_dtypes' own loop.
        np.left_shift(values.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, values, casting="same_kind" if values.dtype == out.dtype else "unsafe")
