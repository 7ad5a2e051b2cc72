# SPDX-License-Identifier: Apache-2.0
"""Weight dtypes: what we compute in, what a device can do, and how stored values become ours."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np

from mmjax.errors import ConfigError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
COMPUTE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}

MIN_BFLOAT16_CAPABILITY = 8.0  # Ampere; older GPUs have no bfloat16 arithmetic


def require_dtype(dtype: str, device: jax.Device) -> np.dtype:
    """The numpy dtype of a compute dtype's name.

    Raises:
      ConfigError: a name that is neither float32 nor bfloat16, or one that the device lacks.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype={dtype!r}: weights are computed in one of {', '.join(COMPUTE_DTYPES)}")
    capability = getattr(device, "compute_capability", None)
    if dtype == "bfloat16" and capability is not None and float(capability) < MIN_BFLOAT16_CAPABILITY:
        raise ConfigError(
            f"dtype='bfloat16': {device.device_kind} has compute capability {capability}, bfloat16 needs"
            f" {MIN_BFLOAT16_CAPABILITY}; pass dtype='float32'"
        )
    return COMPUTE_DTYPES[dtype]


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
