# SPDX-License-Identifier: Apache-2.0
"""Which rows of the pool each request holds: one cache reference for every item that has rows or is to get them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import count

import numpy as np
from jaxtyping import Int32

from mmjax.encoder.admission import check_limits
from mmjax.encoder.buckets import BucketLadder
from mmjax.encoder.budgets import EncoderBudgets, Readiness
from mmjax.encoder.cache import Acquired, EntryState, RowCache
from mmjax.encoder.plan import ItemRef
from mmjax.encoder.state import CacheKey, EncoderItem, MultimodalEncoderRequestState
from mmjax.encoder.step import MultimodalEncoderRequestError


class RequestRows:
    """Requests from admission to removal, and the rows that their items hold in between.

    Every method takes the id of a request without items, or of one that is gone, as a request that holds nothing; only
    those that hand out rows raise MultimodalEncoderRequestError.
    """

    def __init__(self, budgets: EncoderBudgets, ladder: BucketLadder):
        self.budgets = budgets
        self.ladder = ladder
        self.cache = RowCache(budgets.capacity_rows, budgets.row_bytes)
        self._by_request = budgets.readiness is Readiness.REQUEST
        self._retain = budgets.reuse_bytes > 0
        self._states: dict[str, MultimodalEncoderRequestState] = {}
        self._bound: dict[CacheKey, list[ItemRef]] = {}  # the references of each cache entry
        self._ahead: set[CacheKey] = set()  # entries with a reference of a step, for no request
        self._ranks = count()

    def admit(self, request_id: str, items: Sequence[EncoderItem]) -> None:
        """Registers a request's items, in prompt order, with their pixels at hand unless `set_pixels` says otherwise.

        Raises RequestError if one can never be encoded.
        """
        if request_id in self._states:
            raise ValueError(f"request {request_id} is admitted already")
        check_limits(request_id, items, self.budgets, self.ladder)
        if items:
            self._states[request_id] = MultimodalEncoderRequestState(request_id, tuple(items), rank=next(self._ranks))

    def set_pixels(self, request_id: str, item: int, present: bool) -> None:
        """Tells whether the item's pixels are at hand; without them it can only use rows that others encode."""
        if request_id in self._states:
            self._states[request_id].item_pixels[item] = present

    def lacking_pixels(self, request_id: str, computed: int) -> list[int]:
        """Items that prefill past `computed` tokens would have to encode, but whose pixels are gone."""
        state = self._states.get(request_id)
        if state is None:
            return []
        state.computed = computed
        absent = [i for i in state.needed() if not state.item_pixels[i]]
        return [i for i in absent if self.cache.state(state.key(i)) is not EntryState.READY]

    def advance(self, request_id: str, computed: int) -> None:
        """Gives back the rows of items whose last position is among the first `computed`, all prefilled by now."""
        state = self._states.get(request_id)
        if state is None:
            return
        state.computed = computed
        if self._by_request and state.items[-1].last >= computed:
            return
        self._unbind_all(state, (i for i, item in enumerate(state.items) if item.last < computed))

    def release(self, request_id: str) -> None:
        """Gives back every row of a request that is preempted; it keeps its place in line. Idempotent."""
        state = self._states.get(request_id)
        if state is not None:
            state.computed = 0
            self._unbind_all(state, range(len(state.items)))

    def remove(self, request_id: str) -> None:
        """Gives back every row of a request that finished, failed or was cancelled, and forgets it. Idempotent."""
        self.release(request_id)
        self._states.pop(request_id, None)

    def holds_rows(self, request_id: str) -> bool:
        """Whether a request holds rows or a reservation: if it can't go on, it is the one to preempt."""
        return request_id in self._states and self._states[request_id].holds_rows

    def ready_end(self, request_id: str, computed: int, end: int) -> int:
        """How far a chunk [computed, end) may go with the rows that are there already."""
        if request_id in self._states:
            self._states[request_id].computed = computed
        return self._reach(request_id, end, ())

    def row_slots(self, request_id: str, item: int) -> Int32[np.ndarray, "R"]:
        """Pool rows of an item, in order, read-only. Raises MultimodalEncoderRequestError if it has none."""
        if request_id not in self._states:
            raise MultimodalEncoderRequestError("is no longer active or has no encoder item state", [request_id])
        state = self._states[request_id]
        if not state.item_ready[item]:
            raise MultimodalEncoderRequestError("has no encoder output", [request_id], item)
        return self.cache.slots(state.item_cache_keys[item])

    def chunk_slots(self, request_id: str, cached: int, in_chunk: int) -> Int32[np.ndarray, "R"]:
        """Pool rows that a chunk takes: rows [cached, cached + in_chunk) of the request's items laid end to end.

        Only items that the window meets need rows; the rows of a single one are not copied. Raises
        MultimodalEncoderRequestError if there are fewer rows than asked for.
        """
        parts, start = [], 0
        for i, item in enumerate(self._states[request_id].items if request_id in self._states else ()):
            low, high = max(cached - start, 0), min(cached + in_chunk - start, item.load.rows)
            if low < high:
                parts.append(self.row_slots(request_id, i)[low:high])
            start += item.load.rows
        if cached + in_chunk > start:
            raise MultimodalEncoderRequestError(f"wants rows up to {cached + in_chunk}, it has {start}", [request_id])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def invalidate(self) -> None:
        """Forgets all rows, because the weights changed. Raises RuntimeError while anybody holds some."""
        if self._bound or self._ahead:
            raise RuntimeError(f"{len(self._bound) + len(self._ahead)} live multimodal cache references")
        self.cache.clear()

    def reset(self) -> None:
        """Forgets all rows, because the pool was lost. Every request claims and encodes its items again."""
        for request_id in self._states:
            self.release(request_id)
        for key in list(self._ahead):
            self._release_ahead(key)
        self.cache.clear()

    def _bind(self, state: MultimodalEncoderRequestState, i: int) -> Acquired | None:
        """Takes a reference for an item; None if its rows do not fit."""
        key, rows = state.key(i), state.items[i].load.rows
        acquired = self.cache.acquire(key, rows, self._retain and state.items[i].key is not None)
        if acquired is not None:
            state.set_item_cache_key(i, key)
            state.item_ready[i] = acquired is Acquired.READY_HIT
            self._bound.setdefault(key, []).append(ItemRef(state.request_id, i))
        return acquired

    def _unbind_all(self, state: MultimodalEncoderRequestState, items: Iterable[int]) -> None:
        for i in items:
            if state.item_cache_keys[i] is None:
                continue
            key = state.clear_item_cache_key(i)
            self._bound[key].remove(ItemRef(state.request_id, i))
            if not self._bound[key]:
                del self._bound[key]
            self.cache.release(key)

    def _release_ahead(self, key: CacheKey) -> None:
        if key in self._ahead:
            self._ahead.remove(key)
            self.cache.release(key)

    def _owners(self, key: CacheKey) -> list[str]:
        """Requests with a reference to `key`, oldest reference first."""
        return list(dict.fromkeys(ref.request_id for ref in self._bound.get(key, ())))

    def _reach(self, request_id: str, end: int, coming: Collection[CacheKey]) -> int:
        """Where a chunk must end if it can use rows that are there and those of the keys `coming`."""
        state = self._states.get(request_id)
        if state is None:
            return end
        for i in state.needed(None if self._by_request else end):
            if state.item_cache_keys[i] not in coming:
                return state.computed if self._by_request else max(state.computed, state.items[i].first)
        return end
