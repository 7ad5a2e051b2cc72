# SPDX-License-Identifier: Apache-2.0
"""Chunk accounting: which embedding rows of a request belong to the prompt positions [past, end) of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True, eq=False)
class MultimodalRuntimeData:
    """Rows of one request in one step, read from the cumulative sum of its `embed_mask`.

    Args:
      past_seen_token_num: prompt positions computed before this step, those of a prefix hit included.
      chunk_end_pos: end of this step's positions, exclusive.
      embed_mask_cumsum: int64 [S] over the whole expanded prompt.

    Raises:
      TypeError: the cumulative sum is not a numpy array.
      ValueError: it is empty, or not 0 <= past <= end <= S.
    """

    past_seen_token_num: int
    chunk_end_pos: int
    embed_mask_cumsum: Int64[np.ndarray, "S"]

    def __post_init__(self) -> None:
        if not isinstance(self.embed_mask_cumsum, np.ndarray):
            raise TypeError(f"embed_mask_cumsum must be a numpy array, got {type(self.embed_mask_cumsum).__name__}")
        size = self.embed_mask_cumsum.size
        if size == 0:
            raise ValueError("embed_mask_cumsum is empty")
        if not 0 <= self.past_seen_token_num <= self.chunk_end_pos <= size:
            raise ValueError(
                f"chunk {self.past_seen_token_num}..{self.chunk_end_pos} lies outside a prompt of {size} positions"
            )

    def _rows_before(self, position: int) -> int:
        return int(self.embed_mask_cumsum[position - 1]) if position else 0

    @property
    def num_cached_mm_tokens(self) -> int:
        """Rows whose positions were computed before this step."""
        return self._rows_before(self.past_seen_token_num)

    @property
    def num_mm_tokens_in_chunk(self) -> int:
        """Rows this step uses."""
        return self._rows_before(self.chunk_end_pos) - self.num_cached_mm_tokens

    @property
    def total_embeds_in_request(self) -> int:
        """Rows of the whole prompt."""
        return int(self.embed_mask_cumsum[-1])
