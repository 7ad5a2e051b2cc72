# SPDX-License-Identifier: Apache-2.0
"""Where kernels of Pallas' Mosaic back end can run; importing that back end takes long, so this does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

# Releases of jax whose interface the kernels are written for: from the first, up to but not the second.
FIRST, END = (0, 11), (0, 12)
# Their matrix instructions are Hopper's alone.
HOPPER, BLACKWELL = (9, 0), (10, 0)
# Rows of Hopper's matrix instructions, and so the most query heads a key head may have.
ROWS = 64


def available(compute_capability: tuple[int, int]) -> bool:
    """Whether kernels for Hopper can be compiled by this jax for a device of this compute capability."""
    return FIRST <= jax.__version_info__ < END and HOPPER <= compute_capability < BLACKWELL


def serves_decode(dtype: DTypeLike, head_dim: int, page: int, group: int) -> bool:
    """Whether the decode kernel takes pages of `page` tokens and `group` query heads to each key head."""
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    whole_pages = page % 8 == 0 and (page % 64 == 0 or 64 % page == 0) and page <= 128
    return half and whole_pages and head_dim % 16 == 0 and head_dim <= 256 and group <= ROWS
