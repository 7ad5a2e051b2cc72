# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by group without a sort, every group padded to whole blocks, so that a block belongs to one group."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Rows are ranked by comparing them with each other, this many at a time.
_CHUNK = 1024


class RowGroups(NamedTuple):
    """Where each row lies once its group is padded to blocks.

    Attributes:
      slot: each row's place among blocks x block_rows; rows of a group keep their order.
      source: the row that lies at each place, the number of rows where there is none.
      group: the group of each block; any group where the block holds no row.
      count: blocks that hold rows; they come first.
    """

    slot: Int[Array, " R"]
    source: Int[Array, " places"]
    group: Int[Array, " blocks"]
    count: Int[Array, ""]

    @property
    def block_rows(self) -> int:
        return len(self.source) // len(self.group)


def most_blocks(rows: int, groups: int, block_rows: int) -> int:
    """The most blocks that `rows` rows can need: a group of few rows takes a whole block."""
    active = min(rows, groups)
    return active + (rows - active) // block_rows


def row_groups(group_of_row: Int[Array, " R"], groups: int, block_rows: int) -> RowGroups:
    """Lays out the rows, each of which names one of `groups` groups."""
    rows = len(group_of_row)
    rank, sizes = _rank(group_of_row, groups)
    blocks_of_group = -(-sizes // block_rows)
    block_end = jnp.cumsum(blocks_of_group, dtype=jnp.int32)
    slot = (block_end - blocks_of_group)[group_of_row] * block_rows + rank
    # Whoever gathers by slot would otherwise work it out anew for every value it gathers.
    slot = lax.optimization_barrier(slot)
    blocks = most_blocks(rows, groups, block_rows)
    source = jnp.full(blocks * block_rows, rows, jnp.int32)
    source = source.at[slot].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    group = (block_end[None, :] <= jnp.arange(blocks, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
    return RowGroups(slot, source, jnp.minimum(group, groups - 1), block_end[-1])


def spread(x: Float[Array, "T E"], groups: RowGroups, rows_per_token: int) -> Float[Array, "places E"]:
    """The tokens' values at the places of their rows; row r is of token r // rows_per_token.

    Places without a row repeat the last token.
    """
    return jnp.take(x, groups.source // rows_per_token, axis=0, mode="clip")


def _rank(group_of_row: Int[Array, " R"], groups: int) -> tuple[Int[Array, " R"], Int[Array, " X"]]:
    """How many earlier rows share a row's group, and the size of every group."""
    rows = len(group_of_row)
    size = min(rows, _CHUNK)
    chunks = -(-rows // size)
    chunked = jnp.pad(group_of_row, (0, chunks * size - rows), constant_values=groups).reshape(chunks, size)
    earlier: Bool[Array, "size size"] = jnp.tri(size, k=-1, dtype=bool)
    same = chunked[:, :, None] == chunked[:, None, :]
    rank = (same & earlier).sum(2, dtype=jnp.int32)
    sizes = (chunked[:, :, None] == jnp.arange(groups, dtype=jnp.int32)).sum(1, dtype=jnp.int32)
    before = jnp.cumsum(sizes, axis=0, dtype=jnp.int32) - sizes
    rank = rank + jnp.take_along_axis(before, jnp.minimum(chunked, groups - 1), axis=1)
    return rank.reshape(-1)[:rows], sizes.sum(0, dtype=jnp.int32)
