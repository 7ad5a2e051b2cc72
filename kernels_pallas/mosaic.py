# SPDX-License-Identifier: Apache-2.0
"""Where kernels of Pallas' Mosaic back end can run; importing that back end takes long, so this does not."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

# Releases of jax whose interface the kernels are written for: from the first, up to but not the second.
FIRST, END = (0, 11, 2), (0, 12)
# Their matrix instructions are Hopper's alone.
HOPPER, BLACKWELL = (9, 0), (10, 0)
# Rows of Hopper's matrix instructions, and so the most query heads a key head may have.
ROWS = 64
# Rows of a tile of shared memory: copies to and from it begin at multiples of this.
ROW_TILE = 8
# Tokens of the longest segment for which the packed kernel has sizes of its own: a window of the towers that have them.
SHORT = 64
# Tokens of a page: a step of the decode kernel reads 64 tokens, or a page if that is more. Two such blocks of keys and
# two of values have to fit into shared memory.
PAGES, BLOCK_VALUES = (16, 32, 64, 128), 64 * 256


def available(compute_capability: tuple[int, int]) -> bool:
    """Whether kernels for Hopper can be compiled by this jax for a device of this compute capability."""
    return FIRST <= jax.__version_info__ < END and HOPPER <= compute_capability < BLACKWELL


def serves_decode(dtype: DTypeLike, head_dim: int, page: int, group: int) -> bool:
    """Whether the decode kernel takes pages of `page` tokens and `group` query heads to each key head."""
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    fits = max(page, 64) * head_dim <= BLOCK_VALUES and head_dim % 16 == 0
    return half and page in PAGES and fits and group <= ROWS


@cache
def packed_tuning() -> dict[int, dict]:
    """Sizes of the packed attention kernel by head dim, which is padded to `width`.

    `chosen` where the kernel was measured to be the fastest there is, `prefill` where the paged prefill kernel, which
    shares its sizes, is. `short`: what differs for segments of at most `SHORT` tokens.
    """
    table = json.loads(resources.files("kernels_pallas").joinpath("packed_mosaic.json").read_text())
    return {row["head_dim"]: row for row in table["head_dims"]}


def serves_packed(dtype: DTypeLike, head_dim: int) -> bool:
    """Whether the packed attention kernel is the fastest for inputs of this kind."""
    return jnp.dtype(dtype) == jnp.bfloat16 and packed_tuning().get(head_dim, {"chosen": False})["chosen"]


def serves_windows(dtype: DTypeLike, head_dim: int) -> bool:
    """Whether the packed attention kernel is the fastest for windows of inputs of this kind, too."""
    return serves_packed(dtype, head_dim) and packed_tuning()[head_dim]["short"]["chosen"]


def serves_prefill(dtype: DTypeLike, head_dim: int, page: int) -> bool:
    """Whether the paged prefill kernel takes such inputs and pages of `page` tokens."""
    row = packed_tuning().get(head_dim, {"prefill": False})
    return jnp.dtype(dtype) == jnp.bfloat16 and row["prefill"] and page in PAGES
