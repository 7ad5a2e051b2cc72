# SPDX-License-Identifier: Apache-2.0
"""Which prompt positions belong to items, which of them take an embedding row, and where each item's runs lie.

The names follow TensorRT-LLM's helpers. Terms: `mm_mask` marks every position of an item, special tokens included;
`embed_mask` marks those that take a row; `lengths` are positions of each item in prompt order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int64

from mmjax.errors import PlaceholderError

Ids = Int[np.ndarray, "S"]
Mask = Bool[np.ndarray, "S"]


def compute_mm_masks(
    input_ids: Ids,
    vocab_size: int | None = None,
    mm_token_ids: Sequence[int] | None = None,
    mm_special_token_ids: Sequence[int] | None = None,
) -> tuple[Mask, Mask, Mask | None]:
    """(mm_mask, embed_mask, special_mask), found by token id.

    A position takes a row if its id is one of `mm_token_ids` or, without those, at least `vocab_size`; ids that are
    special never do, even when `mm_token_ids` lists them. `special_mask` is None when no special ids are given.

    Raises:
      ValueError: neither `vocab_size` nor `mm_token_ids` is given.
    """
    ids = np.asarray(input_ids)
    if mm_token_ids is not None:
        embed = np.isin(ids, np.asarray(mm_token_ids).reshape(-1))
    elif vocab_size is not None:
        embed = ids >= vocab_size
    else:
        raise ValueError("item positions need vocab_size or mm_token_ids to be told apart from text")
    if mm_special_token_ids is None:
        return embed, embed, None
    special = np.isin(ids, np.asarray(mm_special_token_ids).reshape(-1))
    embed = embed & ~special
    return embed | special, embed, special


def _cut_by_item(mm_mask: Mask, lengths: Sequence[int]) -> list[Int64[np.ndarray, "length"]]:
    """Prompt positions of each item, in order; empty when the mask is."""
    positions = np.flatnonzero(mm_mask)
    if positions.size == 0:
        return []
    if sum(lengths) != positions.size:
        raise PlaceholderError(f"items claim {sum(lengths)} prompt positions, the prompt holds {positions.size}")
    return np.split(positions, np.cumsum(lengths)[:-1])


def _runs(positions: Int64[np.ndarray, "n"]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive positions, as (first position, length)."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(run[0]), int(run.size)) for run in np.split(positions, breaks)]


def find_mm_token_start_pos_from_masks(
    mm_mask: Mask, special_mask: Mask | None, lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """First position of each item, and which of all item positions (counted without the text) are special."""
    items = _cut_by_item(mm_mask, lengths)
    if not items or special_mask is None:
        return [int(item[0]) for item in items], []
    return [int(item[0]) for item in items], np.flatnonzero(special_mask[mm_mask]).tolist()


def find_mm_token_runs_from_mask(mm_mask: Mask, lengths: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Exact contiguous runs of every item: (item offsets into the runs, run positions, run lengths)."""
    offsets, positions, run_lengths = [0], [], []
    for item in _cut_by_item(mm_mask, lengths):
        for position, length in _runs(item):
            positions.append(position)
            run_lengths.append(length)
        offsets.append(len(positions))
    return offsets, positions, run_lengths


def find_mm_embedding_lengths_from_masks(mm_mask: Mask, embed_mask: Mask, lengths: Sequence[int]) -> list[int]:
    """Embedding rows of each item: how many of its positions are not special."""
    return [int(embed_mask[item].sum()) for item in _cut_by_item(mm_mask, lengths)]


def mm_embed_cumsum(embed_mask: Mask) -> Int64[np.ndarray, "S"]:
    """Rows used up to and including each position; all chunk accounting reads this array."""
    return np.cumsum(embed_mask, dtype=np.int64)


def maybe_compute_mm_embed_cumsum(
    input_ids: Ids,
    extra: dict[str, Any] | None,
    *,
    vocab_size: int | None = None,
    mm_token_ids: Sequence[int] | None = None,
    mm_special_token_ids: Sequence[int] | None = None,
) -> None:
    """Stores `multimodal_embed_mask_cumsum` in `extra["multimodal_data"]`, unless it is there or can't be known."""
    data = None if extra is None else extra.get("multimodal_data")
    if data is None or "multimodal_embed_mask_cumsum" in data:
        return
    if vocab_size is None and mm_token_ids is None:
        return
    _, embed_mask, _ = compute_mm_masks(input_ids, vocab_size, mm_token_ids, mm_special_token_ids)
    data["multimodal_embed_mask_cumsum"] = mm_embed_cumsum(embed_mask)


def validate_mm_inputs(prompt_len: int, runs: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Checks that every item has runs, in prompt order, disjoint, and inside the prompt.

    Args:
      runs: for each item its (position, length) runs. Items may interleave with text, but not with each other.

    Raises:
      PlaceholderError: naming the item and both numbers.
    """
    end = 0
    for index, item in enumerate(runs):
        if not item:
            raise PlaceholderError("it has no position in the prompt", item=index)
        for position, length in item:
            if position < end:
                raise PlaceholderError(f"its run at {position} overlaps what ends at {end}", item=index)
            end = position + length
            if length <= 0 or end > prompt_len:
                raise PlaceholderError(f"its run {position}..{end} lies outside a prompt of {prompt_len}", item=index)
