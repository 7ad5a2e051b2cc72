# SPDX-License-Identifier: Apache-2.0
"""Pages of keys and values: what a step knows about them, and how new tokens are written.

One array a layer, [num_blocks, 2, K, page, D] (0 = keys, 1 = values). Slot = block * page + offset.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int


@flax.struct.dataclass
class PagedPrefill:
    """One prefill step: chunks of up to S sequences, packed from token 0.

    Attributes:
      cu_seqlens: first token of each chunk, then the number of real tokens; empty chunks repeat an offset.
      prefix_lens: tokens of each sequence that are in pages already.
      block_tables: the pages of each sequence in order; entries past its end may be anything.
      slots: where each token's key and value go; a slot past the pool is dropped (padding).
      any_prefix: static; False promises that all `prefix_lens` are 0, so that nothing needs to look for prefixes.
    """

    cu_seqlens: Int[Array, "S+1"]
    prefix_lens: Int[Array, " S"]
    block_tables: Int[Array, "S M"]
    slots: Int[Array, " T"]
    any_prefix: bool = flax.struct.field(pytree_node=False, default=True)


@flax.struct.dataclass
class PagedDecode:
    """One decode step: one new token for each of B sequences.

    Attributes:
      seq_lens: tokens of each sequence, the new one included; 0 marks a padding row.
      block_tables: the pages of each sequence in order; entries past its end may be anything.
      slots: where the new token's key and value go; a slot past the pool is dropped.
    """

    seq_lens: Int[Array, " B"]
    block_tables: Int[Array, "B M"]
    slots: Int[Array, " B"]


def write_kv(
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    slots: Int[Array, " T"],
) -> Float[Array, "num_blocks 2 K page D"]:
    """The pages after token t was written to slots[t]; in place where the caller donates `kv_layer`.

    Real slots are distinct and not negative (-1 would wrap to the last page); others are dropped.
    """
    return write_rows(kv_layer, jnp.stack([k, v], axis=1), slots)


def write_rows(
    pages: Float[Array, "num_blocks parts K page D"], rows: Float[Array, "T parts K D"], slots: Int[Array, " T"]
) -> Float[Array, "num_blocks parts K page D"]:
    """The pages after row t was written to slots[t]; see `write_kv`, whose pages have two parts."""
    num_blocks, _, _, page, _ = pages.shape
    pool = num_blocks * page
    # Dropped slots are spread out past the pool, so that all are distinct and the scatter may run in any order.
    slots = jnp.where(slots < pool, slots, pool + jnp.arange(slots.shape[0], dtype=slots.dtype))
    at = pages.at[slots // page, :, :, slots % page]
    return at.set(rows.astype(pages.dtype), mode="drop", unique_indices=True)


def read_pages(
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    blocks: Int[Array, "*batch n"],
    valid: Bool[Array, "*batch n*page"],
    dtype: DTypeLike,
) -> tuple[Float[Array, "*batch K n*page D"], Float[Array, "*batch K n*page D"]]:
    """Keys and values of `n` pages in a row, as `dtype`, with zeros where not `valid` (a page's tail may hold NaN)."""
    pages = kv_layer.at[blocks].get(mode="clip").astype(dtype)
    *batch, n, _, kv_heads, page, width = pages.shape
    order = (*range(len(batch)), *(len(batch) + axis for axis in (1, 2, 0, 3, 4)))
    pages = pages.transpose(order).reshape(*batch, 2, kv_heads, n * page, width)
    pages = jnp.where(valid[..., None, None, :, None], pages, 0)
    return pages[..., 0, :, :, :], pages[..., 1, :, :, :]
