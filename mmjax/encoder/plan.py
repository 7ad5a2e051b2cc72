# SPDX-License-Identifier: Apache-2.0
"""What one engine step encodes: the items, the batches they form, and how far each request may prefill."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from mmjax.encoder.buckets import BucketLadder, EncoderLoad
from mmjax.encoder.budgets import EncoderBudgets
from mmjax.encoder.state import CacheKey
from mmjax.inputs.items import EncoderBucket


class Refusal(StrEnum):
    """Why an item gets no rows in this step: no row slots, no encoder budget left, or no pixels to encode from."""

    ROWS = auto()
    BUDGET = auto()
    PIXELS = auto()


class Claim(NamedTuple):
    """How far a request may prefill, and what stops it short of what it wanted."""

    end: int
    refusal: Refusal | None = None


class ItemRef(NamedTuple):
    request_id: str
    item: int


class EncodeItem(NamedTuple):
    """One item to encode or write, from what `request_id` brought; its rows go to the pool's `slots`, in order."""

    request_id: str
    item: int
    key: CacheKey
    load: EncoderLoad
    slots: Int32[np.ndarray, "R"]


@dataclass(frozen=True)
class EncodeBatch:
    """Items of one encoder call, in the order in which they are packed, and the bucket they fit."""

    items: tuple[EncodeItem, ...]
    load: EncoderLoad
    bucket: EncoderBucket


@dataclass(frozen=True)
class EncodePlan:
    """One step's encoder work.

    Attributes:
      batches: encoder calls to make, in order.
      writes: items whose rows came with the request and only have to be written.
      chunk_end: by request that asked, the prompt position its chunk may reach once the batches ran.
      hits: items that found their rows in the cache in this step.
      lacking_pixels: items that must be decoded and processed again before they can be encoded.
      look_ahead: keys encoded for later, to which no request holds a reference.
    """

    batches: tuple[EncodeBatch, ...]
    writes: tuple[EncodeItem, ...]
    chunk_end: dict[str, int]
    hits: tuple[ItemRef, ...]
    lacking_pixels: tuple[ItemRef, ...]
    look_ahead: tuple[CacheKey, ...]

    def __bool__(self) -> bool:
        """Whether there is anything to encode or to write."""
        return bool(self.batches or self.writes)

    @property
    def items(self) -> list[EncodeItem]:
        return [item for batch in self.batches for item in batch.items]


class BatchBuilder:
    """Collects the keys of a step in order, in batches that each stay within A and B and fit a compiled bucket.

    Args:
      token_cap: at most so many tokens in this step, though always one item; None for no cap.
      single: one batch a step. Otherwise a full batch opens the next one and nothing is ever refused.
    """

    def __init__(self, budgets: EncoderBudgets, ladder: BucketLadder, token_cap: int | None, single: bool):
        self.batches: list[list[CacheKey]] = []
        self.writes: list[CacheKey] = []
        self._max_items = budgets.batch_size
        self._max_tokens = min(budgets.max_num_tokens, token_cap) if token_cap is not None else budgets.max_num_tokens
        self._ladder = ladder
        self._single = single
        self._load = EncoderLoad()
        self._loads: dict[CacheKey, EncoderLoad] = {}

    def __contains__(self, key: CacheKey) -> bool:
        return key in self._loads

    def fits(self, load: EncoderLoad) -> bool:
        """Whether an item can still be encoded in this step."""
        return not load.tokens or not self._single or not self.batches or self._joins(load)

    def add(self, key: CacheKey, load: EncoderLoad) -> None:
        self._loads[key] = load
        if not load.tokens:
            self.writes.append(key)
            return
        if not self.batches or not self._joins(load):
            self.batches.append([])
            self._load = EncoderLoad()
        self.batches[-1].append(key)
        self._load = EncoderLoad.total((self._load, load))

    def drop(self, keys: Collection[CacheKey]) -> None:
        """Takes keys back, which leaves their part of the budget to others."""
        kept = {key: load for key, load in self._loads.items() if key not in keys}
        self.batches, self.writes, self._load, self._loads = [], [], EncoderLoad(), {}
        for key, load in kept.items():
            self.add(key, load)

    def _joins(self, load: EncoderLoad) -> bool:
        total = EncoderLoad.total((self._load, load))
        within = total.items <= self._max_items and total.tokens <= self._max_tokens
        return within and self._ladder.fit(total) is not None
