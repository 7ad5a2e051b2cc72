# SPDX-License-Identifier: Apache-2.0
"""What the encoder plane knows of one request: its items, their cache keys, and which of them have rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import NamedTuple

from mmjax.encoder.buckets import EncoderLoad
from mmjax.inputs.items import ItemPlan

CacheKey = Hashable


class MultimodalEncoderProgress(StrEnum):
    """How many of a request's items have their rows: none, some, or all."""

    PENDING = auto()
    PARTIAL = auto()
    READY = auto()


class EncoderItem(NamedTuple):
    """One item as the scheduler sees it; a snapshot that later changes to the prompt do not reach.

    Attributes:
      key: content key (modality, 8 hash ints, rows, hash of processor options), None if it can't be shared.
      load: what encoding it takes.
      first, last: the first and last prompt position that takes one of its rows.
      number: what callers know it by; None: its place among the request's items.
    """

    key: CacheKey | None
    load: EncoderLoad
    first: int
    last: int
    number: int | None = None

    @classmethod
    def from_plan(cls, plan: ItemPlan, row_positions: Sequence[int], key: CacheKey | None) -> EncoderItem:
        """The item of `plan` whose rows go to the ascending prompt positions `row_positions`."""
        load = EncoderLoad(1, plan.encoder_tokens, len(plan.contexts), plan.windows, plan.rows)
        return cls(key, load, int(row_positions[0]), int(row_positions[-1]))

    @classmethod
    def supplied(cls, row_positions: Sequence[int], key: CacheKey | None) -> EncoderItem:
        """An item whose embedding rows the caller gives: it takes rows of the pool, but nothing of the encoder."""
        return cls(key, EncoderLoad(rows=len(row_positions)), int(row_positions[0]), int(row_positions[-1]))


@dataclass
class MultimodalEncoderRequestState:
    """Progress of one request. Lists have one entry per item, in prompt order.

    Attributes:
      rank: place in the order of admission; it survives preemption.
      computed: prompt tokens whose KV is there, so that items before them need no rows.
      item_cache_keys: the key whose cache entry the item holds a reference to, None while it holds none.
      item_ready: whether that entry has rows.
      item_pixels: whether its pixels (or the rows supplied in their place) are at hand; False once they were dropped.
    """

    request_id: str
    items: tuple[EncoderItem, ...]
    rank: int = 0
    computed: int = 0
    item_cache_keys: list[CacheKey | None] = field(default_factory=list)
    item_ready: list[bool] = field(default_factory=list)
    item_pixels: list[bool] = field(default_factory=list)

    def __post_init__(self):
        count = len(self.items)
        self.item_cache_keys = self.item_cache_keys or [None] * count
        self.item_ready = self.item_ready or [False] * count
        self.item_pixels = self.item_pixels or [True] * count
        if len(self.item_cache_keys) != count:
            raise ValueError(f"need one cache key per item slot: {len(self.item_cache_keys)} keys, {count} items")
        if len(self.item_ready) != count or len(self.item_pixels) != count:
            raise ValueError(f"need one flag per item slot: {len(self.item_ready)} flags, {count} items")

    @property
    def progress(self) -> MultimodalEncoderProgress:
        if all(self.item_ready):
            return MultimodalEncoderProgress.READY
        return MultimodalEncoderProgress.PARTIAL if any(self.item_ready) else MultimodalEncoderProgress.PENDING

    @property
    def pending_item_indices(self) -> list[int]:
        return [i for i, ready in enumerate(self.item_ready) if not ready]

    @property
    def holds_rows(self) -> bool:
        """Whether it holds a reference to any cache entry."""
        return any(key is not None for key in self.item_cache_keys)

    def needed(self, end: int | None = None) -> list[int]:
        """Items without rows that take some in prompt positions [computed, end); no `end` means the whole rest."""
        return [
            i
            for i, item in enumerate(self.items)
            if not self.item_ready[i] and item.last >= self.computed and (end is None or item.first < end)
        ]

    def key(self, index: int) -> CacheKey:
        """The item's content key, or one that nobody else can have."""
        key = self.items[index].key
        return ("mm_transient", self.request_id, index) if key is None else key

    def set_item_cache_key(self, index: int, key: CacheKey) -> None:
        if self.item_cache_keys[index] is not None:
            raise ValueError(f"item {index} of request {self.request_id} holds {self.item_cache_keys[index]} already")
        self.item_cache_keys[index] = key

    def clear_item_cache_key(self, index: int) -> CacheKey:
        """Forgets the item's key and returns it; the caller releases the reference."""
        key = self.item_cache_keys[index]
        if key is None:
            raise ValueError(f"item {index} of request {self.request_id} holds no cache key")
        self.item_cache_keys[index] = None
        self.item_ready[index] = False
        return key

    def mark_cache_key_ready(self, key: CacheKey) -> list[int]:
        """Marks every slot bound to `key`; returns those that were not ready before."""
        found = [i for i in self.pending_item_indices if self.item_cache_keys[i] == key]
        for i in found:
            self.item_ready[i] = True
        return found

    def pop_all_cache_keys(self) -> list[CacheKey]:
        """Forgets every key and returns them in prompt order, with duplicates: each slot owns one reference."""
        keys = [key for key in self.item_cache_keys if key is not None]
        self.item_cache_keys = [None] * len(self.items)
        self.item_ready = [False] * len(self.items)
        return keys
