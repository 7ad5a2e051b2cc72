# SPDX-License-Identifier: Apache-2.0
"""Packed segments of queries cut to the tiles that `mosaic_attention` goes through, computed on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kernels_pallas.mosaic import ROW_TILE
from kernels_pallas.mosaic_attention import Plan


class Tiles(NamedTuple):
    """What lies where; entries past the first `used` mean nothing.

    Attributes:
      first: first row of the tile.
      segment: which segment it belongs to; the padding behind the last is one more.
      start, end: rows of its segment.
      base: the multiple of 8 at or before `start`, where the segment's first tile begins.
      real: whether its segment has keys, which the padding has not.
    """

    first: Int[Array, " tiles"]
    segment: Int[Array, " tiles"]
    start: Int[Array, " tiles"]
    end: Int[Array, " tiles"]
    base: Int[Array, " tiles"]
    real: Bool[Array, " tiles"]
    used: Int[Array, ""]

    def table(self, steps: Int[Array, " tiles"], *columns: Int[Array, " tiles"]) -> Int[Array, "tiles+1 columns"]:
        """The table of `attention_kernel`: first row, segment's start and end, steps over keys, and further columns."""
        rows = jnp.stack([self.first, self.start, self.end, jnp.where(self.real, steps, 0), *columns], 1)
        return jnp.concatenate([rows, jnp.broadcast_to(self.used, (1, rows.shape[1]))]).astype(jnp.int32)


def cut_to_tiles(plan: Plan, cu_seqlens: Int[Array, "S+1"], *, last_first: bool = False) -> Tiles:
    """Tiles of `plan.rows` rows of every segment and of the padding, in order, or the last one first."""
    ends = jnp.append(cu_seqlens[1:], plan.tokens)
    base = cu_seqlens // ROW_TILE * ROW_TILE
    counts = jnp.where(ends > cu_seqlens, -(-(ends - base) // plan.rows), 0)
    index = jnp.arange(plan.segments + 1)
    last = jnp.where(index <= index[:, None], counts, 0).sum(1)
    tile = jnp.arange(plan.tiles)
    if last_first:
        tile = last[-1] - 1 - tile
    segment = jnp.minimum((tile[:, None] >= last).sum(1), plan.segments)
    start, end, own_base = cu_seqlens[segment], ends[segment], base[segment]
    first = own_base + (tile - (last - counts)[segment]) * plan.rows
    return Tiles(first, segment, start, end, own_base, segment < plan.segments, last[-1])
