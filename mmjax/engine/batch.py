# SPDX-License-Identifier: Apache-2.0
"""Turns scheduled work into the fixed-shape host arrays of a prefill or decode step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.engine.request import Request
from mmjax.errors import PlaceholderError

RowSlots = Callable[[Request, int], np.ndarray]  # (request, item index) -> int32 pool rows of the item


@dataclass(frozen=True)
class Chunk:
    """Positions [begin, end) of a request's prompt (or of prompt and output after a preemption)."""

    request: Request
    begin: int
    end: int

    @property
    def completes(self) -> bool:
        """True if the chunk ends the prefill, so that a token is sampled behind it."""
        return self.end == self.request.prefill_end

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """Sizes that the arrays of a step refer to.

    Attributes:
      page: tokens of a KV page.
      num_blocks: pages of the pool; a KV slot of num_blocks * page or more is dropped.
      table_width: page-table entries of one sequence.
      num_slots: rows of per-sequence device state; that number itself marks padding.
      pool_rows: rows of the embedding pool; that number itself means "the token's own embedding".
      axes: rotary position axes.
    """

    page: int
    num_blocks: int
    table_width: int
    num_slots: int
    pool_rows: int
    axes: int

    @property
    def kv_slots(self) -> int:
        return self.page * self.num_blocks

    def token_slots(self, table: Sequence[int], begin: int, end: int) -> np.ndarray:
        """KV slots of positions [begin, end), int32."""
        positions = np.arange(begin, end)
        return (np.asarray(table, np.int32)[positions // self.page] * self.page + positions % self.page).astype(
            np.int32
        )


def _tables(requests: Sequence[Request], size: int, layout: Layout) -> np.ndarray:
    tables = np.zeros((size, layout.table_width), np.int32)
    for row, request in enumerate(requests):
        tables[row, : len(request.table)] = request.table
    return tables


def fill_rows(row_index: np.ndarray, token_ids: np.ndarray, chunk: Chunk, row_slots: RowSlots) -> None:
    """Writes pool rows into `row_index` and 0 into `token_ids` where the chunk's positions take embedding rows.

    Only recorded positions take rows: an id that merely looks like a placeholder keeps its own embedding.

    Raises PlaceholderError if an item has more or fewer rows than positions.
    """
    for item in chunk.request.prompt.items:
        positions = item.row_positions
        first, last = np.searchsorted(positions, (chunk.begin, chunk.end))
        if first < last:
            slots = row_slots(chunk.request, item.index)
            if len(slots) != len(positions):
                raise PlaceholderError(
                    f"{len(slots)} embedding rows for {len(positions)} prompt positions",
                    request_id=chunk.request.id,
                    item=item.number,
                )
            where = positions[first:last] - chunk.begin
            row_index[where] = slots[first:last]
            token_ids[where] = 0


def prefill_arrays(
    chunks: Sequence[Chunk], num_tokens: int, num_sequences: int, layout: Layout, row_slots: RowSlots
) -> dict[str, np.ndarray]:
    """Arrays of one prefill step of `num_tokens` (T) tokens and `num_sequences` (S) sequences, padding included."""
    token_ids = np.zeros(num_tokens, np.int32)
    row_index = np.full(num_tokens, layout.pool_rows, np.int32)
    positions = np.zeros((layout.axes, num_tokens), np.int32)
    slots = np.full(num_tokens, layout.kv_slots, np.int32)
    cu_seqlens = np.zeros(num_sequences + 1, np.int32)
    prefix_lens = np.zeros(num_sequences, np.int32)
    last = np.zeros(num_sequences, np.int32)
    state_slots = np.full(num_sequences, layout.num_slots, np.int32)
    start = 0
    for row, chunk in enumerate(chunks):
        request, stop = chunk.request, start + len(chunk)
        token_ids[start:stop] = request.token_ids(chunk.begin, chunk.end)
        fill_rows(row_index[start:stop], token_ids[start:stop], chunk, row_slots)
        positions[:, start:stop] = request.positions(chunk.begin, chunk.end)
        slots[start:stop] = layout.token_slots(request.table, chunk.begin, chunk.end)
        cu_seqlens[row + 1] = stop
        prefix_lens[row] = chunk.begin
        last[row] = stop - 1
        if chunk.completes:
            state_slots[row] = request.slot
        start = stop
    cu_seqlens[len(chunks) + 1 :] = start
    return {
        "token_ids": token_ids,
        "row_index": row_index,
        "positions": positions,
        "cu_seqlens": cu_seqlens,
        "prefix_lens": prefix_lens,
        "block_tables": _tables([c.request for c in chunks], num_sequences, layout),
        "kv_slots": slots,
        "last": last,
        "slots": state_slots,
    }


def decode_arrays(requests: Sequence[Request], size: int, layout: Layout) -> dict[str, np.ndarray]:
    """Arrays of one decode step of `size` (B) sequences, padding included."""
    positions = np.zeros(size, np.int32)
    seq_lens = np.zeros(size, np.int32)
    kv_slots = np.full(size, layout.kv_slots, np.int32)
    slots = np.full(size, layout.num_slots, np.int32)
    for row, request in enumerate(requests):
        at = request.computed
        positions[row] = at + request.prompt.position_delta
        seq_lens[row] = at + 1
        kv_slots[row] = request.table[at // layout.page] * layout.page + at % layout.page
        slots[row] = request.slot
    return {
        "positions": positions,
        "seq_lens": seq_lens,
        "block_tables": _tables(requests, size, layout),
        "kv_slots": kv_slots,
        "slots": slots,
    }
