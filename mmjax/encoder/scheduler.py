# SPDX-License-Identifier: Apache-2.0
"""The second scheduling plane: which items are encoded in a step, and how far each request may prefill after that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum, auto
from typing import Any

from mmjax.encoder.buckets import BucketLadder, EncoderLoad, PaddingStats
from mmjax.encoder.budgets import EncoderBudgets
from mmjax.encoder.cache import Acquired, EntryState
from mmjax.encoder.plan import BatchBuilder, Claim, EncodeBatch, EncodeItem, EncodePlan, ItemRef, Refusal
from mmjax.encoder.rows import RequestRows
from mmjax.encoder.state import CacheKey, MultimodalEncoderRequestState
from mmjax.encoder.step import blamed_requests


class EncoderSchedulingPolicy(StrEnum):
    """Whose items are encoded.

    DISABLED: those that a prefill reaches, in as many encoder calls as it takes; only single batches keep to A and B.
    DEFAULT: those of the requests that the language model schedules, one batch a step.
    EAGER: those of all active requests, before the language model's capacity is known, one batch a step.
    """

    DISABLED = auto()
    DEFAULT = auto()
    EAGER = auto()


@dataclass
class _Step:
    """What an open step has decided so far. `head`: the oldest request that finds no row slots, and the rows it wants.
    `ahead`: items that are encoded for later."""

    builder: BatchBuilder
    wanted: dict[str, int] = field(default_factory=dict)
    hits: list[ItemRef] = field(default_factory=list)
    lacking_pixels: list[ItemRef] = field(default_factory=list)
    ahead: dict[CacheKey, ItemRef] = field(default_factory=dict)
    head: tuple[MultimodalEncoderRequestState, int] | None = None


class MultimodalItemScheduler(RequestRows):
    """Schedules items under budgets A, B and C over one row cache. One thread calls it.

    A step is `begin`, one `claim` for each request that the language model wants to prefill, oldest first, and `close`,
    which says what to encode; then `commit` or `fail`. After the prefill `advance` gives rows back.

    With `readiness="chunk"` an item takes row slots when a chunk reaches it and gives them back after its last
    position. So a holder reaches the end of its item without taking more, and a request may need more rows than the
    pool has. With `readiness="request"` a request claims rows for all of its items at once and waits for all of them.
    """

    def __init__(
        self,
        budgets: EncoderBudgets,
        ladder: BucketLadder,
        policy: EncoderSchedulingPolicy | str = EncoderSchedulingPolicy.DEFAULT,
    ):
        super().__init__(budgets, ladder)
        self.policy = EncoderSchedulingPolicy(policy)
        self.padding = PaddingStats()
        refusals = (f"refused_{refusal}" for refusal in Refusal)
        self._counts = Counter(dict.fromkeys(("items_encoded", "items_looked_ahead", *refusals), 0))
        self._step: _Step | None = None

    def gate(self, active: Iterable[str], waiting: Sequence[Sequence[EncoderLoad] | None]) -> int:
        """How many requests may leave the head of the waiting queue.

        If requests wait for all of their items, those that active requests and newcomers still need stay within A and
        B, though a head that finds nothing ahead of it always passes. Chunks need no gate: they ask as they go.

        Args:
          waiting: what each needs, in order; None or empty for text, and for what validation is going to refuse.
        """
        if not self._by_request:
            return len(waiting)
        states = [self._states[request_id] for request_id in active if request_id in self._states]
        pending = [state.items[i].load for state in states for i in state.needed()]
        for passed, loads in enumerate(waiting):
            if not loads or any(load.tokens > self.budgets.max_num_tokens for load in loads):
                continue
            lone = not pending
            pending.extend(loads)
            total = EncoderLoad.total(pending)
            within = total.items <= self.budgets.batch_size and total.tokens <= self.budgets.max_num_tokens
            if not (lone or within):
                return passed
        return len(waiting)

    def order(self, request_ids: Sequence[str]) -> list[str]:
        """The order in which the language model should try requests, given in order of admission.

        If requests claim all of their rows at once, one whose rows do not fit must not take tokens or pages from a
        younger one that holds its rows already: it goes behind the last such holder.
        """
        holders = [i for i, request_id in enumerate(request_ids) if self.holds_rows(request_id)]
        if not self._by_request or not holders:
            return list(request_ids)
        split = holders[-1] + 1
        moved = [request_id for request_id in request_ids[:split] if not self._rows_fit(request_id)]
        return [*(r for r in request_ids[:split] if r not in moved), *moved, *request_ids[split:]]

    def begin(self, encoder_token_cap: int | None = None) -> None:
        """Opens a step that encodes at most `encoder_token_cap` tokens, though always one item."""
        single = self.policy is not EncoderSchedulingPolicy.DISABLED
        self._step = _Step(BatchBuilder(self.budgets, self.ladder, encoder_token_cap if single else None, single))

    def claim(self, request_id: str, computed: int, wanted_end: int) -> Claim:
        """Takes rows for the items in prompt positions [computed, wanted_end) and says how far the chunk may go.

        Items before `computed` need none: they are prefilled, or the prefix cache served them. A claim that ends at
        `computed` means that the request can't prefill in this step.
        """
        claim, state = Claim(wanted_end), self._states.get(request_id)
        if state is not None:
            state.computed = computed
            claim = self._claim_all(state, wanted_end) if self._by_request else self._claim_in_order(state, wanted_end)
        self._step.wanted[request_id] = claim.end
        if claim.refusal:
            self._counts[f"refused_{claim.refusal}"] += 1
        return claim

    def look_ahead(self, request_ids: Iterable[str]) -> None:
        """Spends what is left of the step's encoder budget on items that these requests, in line, will need next.

        Nobody holds the rows: a claim may evict them, and one that finds no other rows cancels them. They are for the
        first in line, as many as fit into the unclaimed rows, so that encoding for one never evicts what was encoded
        for another ahead of it. What is reserved already comes first: whoever holds rows must get on.
        """
        if not self._retain or self.policy is EncoderSchedulingPolicy.DISABLED:
            return
        self._select_reserved()
        step, room = self._step, self.cache.capacity_rows - self.cache.claimed_rows
        for state in filter(None, map(self._states.get, request_ids)):
            for i in state.needed():
                key, load = state.items[i].key, state.items[i].load
                if key is None or key in self._bound or key in self._ahead:
                    continue
                room -= load.rows
                if room < 0:
                    return
                if self.cache.get(key, record_stats=False) is not None or not state.item_pixels[i]:
                    continue
                if not step.builder.fits(load):
                    return
                self.cache.acquire(key, load.rows)
                self._ahead.add(key)
                step.ahead[key] = ItemRef(state.request_id, i)
                step.builder.add(key, load)

    def close(self) -> EncodePlan:
        """Ends the step: gives every item to encode its row slots, evicting what nobody holds, and sets chunk ends."""
        step, self._step = self._step, None
        *batches, writes = [self._producers(keys, step) for keys in (*step.builder.batches, step.builder.writes)]
        coming = {key: ref for part in (*batches, writes) for key, ref in part.items()}
        for key in step.ahead.keys() - coming.keys():
            self._release_ahead(key)
        self.cache.allocate(coming)
        return EncodePlan(
            batches=tuple(self._batch(batch) for batch in batches if batch),
            writes=tuple(self._encode_item(key, ref) for key, ref in writes.items()),
            chunk_end={request_id: self._reach(request_id, end, coming) for request_id, end in step.wanted.items()},
            hits=tuple(step.hits),
            lacking_pixels=tuple(step.lacking_pixels),
            look_ahead=tuple(key for key in coming if key in step.ahead),
        )

    def plan(
        self,
        scheduled: Iterable[tuple[str, int, int]],
        encoder_token_cap: int | None = None,
        token_budget: int | None = None,
    ) -> EncodePlan:
        """A whole step at once, for (request, computed tokens, wanted end) of each request, oldest first.

        Args:
          token_budget: prompt tokens to share out. A request that has to stop short leaves its tokens to the next ones;
            were they lost, a request without rows could starve the one that holds them.
        """
        self.begin(encoder_token_cap)
        for request_id, computed, wanted_end in scheduled:
            if token_budget is not None:
                wanted_end = min(wanted_end, computed + token_budget)
            if wanted_end > computed:
                end = self.claim(request_id, computed, wanted_end).end
                token_budget = None if token_budget is None else token_budget - (end - computed)
        return self.close()

    def commit(self, plan: EncodePlan) -> list[ItemRef]:
        """Makes the plan's rows readable; its encoder calls have been dispatched.

        Returns the items whose rows their requests hold from now on: their pixels may be dropped.
        """
        pinned = [ref for ref in plan.hits if ref.request_id in self._states and self._ready(ref)]
        for item in (*plan.items, *plan.writes):
            if self.cache.state(item.key) is not EntryState.RESERVED:
                continue  # its last user left meanwhile
            self.cache.commit(item.key, item.load.rows)
            for request_id in self._owners(item.key):
                ready = self._states[request_id].mark_cache_key_ready(item.key)
                pinned.extend(ItemRef(request_id, i) for i in ready)
        for batch in plan.batches:
            self.padding.record(batch.bucket, batch.load)
        self._counts["items_encoded"] += len(plan.items)
        self._counts["items_looked_ahead"] += len(plan.look_ahead)
        for key in plan.look_ahead:
            self._release_ahead(key)
        return pinned

    def fail(self, plan: EncodePlan, error: Exception) -> list[str]:
        """Requests to blame for an encode step that failed before anything was written; the caller removes them.

        The others keep their reservations and the next step encodes for them; `ready_end` says how far they may go in
        this one. An error that is nobody's fault is raised again.
        """
        for key in plan.look_ahead:
            self._release_ahead(key)
        return [r for r in blamed_requests(error, plan.items, self._owners) if r in self._states]

    def reset(self) -> None:
        self._step = None
        super().reset()

    def stats(self) -> dict[str, Any]:
        """Accounting of the cache, padding, and counts of what was encoded and what was refused."""
        cache = self.cache.stats()
        return {
            "cache": asdict(cache) | {"hit_rate": cache.hit_rate},
            "padding": self.padding.snapshot(),
            **self._counts,
        }

    def _claim_in_order(self, state: MultimodalEncoderRequestState, wanted_end: int) -> Claim:
        for i in state.needed(wanted_end):
            refusal = self._obtain(state, i)
            if refusal:
                return Claim(max(state.computed, state.items[i].first), refusal)
        return Claim(wanted_end)

    def _obtain(self, state: MultimodalEncoderRequestState, i: int) -> Refusal | None:
        """Rows for one item: some that are there, some that are coming, or new ones."""
        step, key, rows = self._step, state.key(i), state.items[i].load.rows
        if self.cache.state(key) is not EntryState.READY:
            refusal = self._selectable(state, i)
            if refusal:
                return refusal
        if state.item_cache_keys[i] is None and not (self._in_turn(state, key, rows) and self._take(state, i)):
            if step.head is None or state.rank < step.head[0].rank:
                step.head = (state, rows)
            return Refusal.ROWS
        if not state.item_ready[i]:
            self._select(state, i)
        return None

    def _in_turn(self, state: MultimodalEncoderRequestState, key: CacheKey, rows: int) -> bool:
        """Whether taking `key` leaves the oldest blocked request its rows, once those ahead of it are through.

        A request may pass it as long as all that its juniors hold fits beside the rows it waits for. Sharing counts
        too: a stream of requests that share one entry would hold it for ever.
        """
        head, head_rows = self._step.head or (state, 0)
        if state.rank <= head.rank:
            return True
        held = {key: rows}
        for other, refs in self._bound.items():
            for request_id, i in refs:
                if self._states[request_id].rank > head.rank:
                    held[other] = self._states[request_id].items[i].load.rows
        return sum(held.values()) <= self.cache.capacity_rows - head_rows

    def _claim_all(self, state: MultimodalEncoderRequestState, wanted_end: int) -> Claim:
        taken = []
        for i in state.needed():
            if state.item_cache_keys[i] is not None:
                continue
            if not self._take(state, i):
                self._unbind_all(state, taken)
                return Claim(state.computed, Refusal.ROWS)
            taken.append(i)
        pending = state.needed()
        for i in pending:
            refusal = self._selectable(state, i)
            if refusal:
                if not any(state.key(j) in self._step.builder for j in pending):
                    self._unbind_all(state, taken)
                return Claim(state.computed, refusal)
            self._select(state, i)
        return Claim(wanted_end)

    def _rows_fit(self, request_id: str) -> bool:
        """Whether a request's missing rows fit beside what is claimed; those that others hold need no room."""
        state = self._states.get(request_id)
        if state is None:
            return True
        missing = {state.key(i): state.items[i].load.rows for i in state.needed() if state.item_cache_keys[i] is None}
        rows = sum(rows for key, rows in missing.items() if not self.cache.references(key))
        return self.cache.claimed_rows + rows <= self.cache.capacity_rows

    def _take(self, state: MultimodalEncoderRequestState, i: int) -> bool:
        acquired = self._bind(state, i)
        if acquired is None and self._step.ahead:
            self._cancel_look_ahead()
            acquired = self._bind(state, i)
        if acquired is Acquired.READY_HIT:
            self._step.hits.append(ItemRef(state.request_id, i))
        return acquired is not None

    def _cancel_look_ahead(self) -> None:
        """Gives up what this step was to encode for later; those who claimed it since still get it."""
        for key in self._step.ahead:
            self._release_ahead(key)
        self._step.builder.drop([key for key in self._step.ahead if key not in self._bound])
        self._step.ahead.clear()

    def _selectable(self, state: MultimodalEncoderRequestState, i: int) -> Refusal | None:
        """Why an item without rows can't be encoded in this step, unless somebody encodes it already."""
        if state.key(i) in self._step.builder:
            return None
        if not state.item_pixels[i]:
            self._step.lacking_pixels.append(ItemRef(state.request_id, i))
            return Refusal.PIXELS
        return None if self._step.builder.fits(state.items[i].load) else Refusal.BUDGET

    def _select(self, state: MultimodalEncoderRequestState, i: int) -> None:
        if state.key(i) not in self._step.builder:
            self._step.builder.add(state.key(i), state.items[i].load)

    def _select_reserved(self) -> None:
        for key, refs in self._bound.items():
            load = self._states[refs[0].request_id].items[refs[0].item].load
            able = any(self._states[request_id].item_pixels[i] for request_id, i in refs)
            reserved = self.cache.state(key) is EntryState.RESERVED and key not in self._step.builder
            if reserved and able and self._step.builder.fits(load):
                self._step.builder.add(key, load)

    def _ready(self, ref: ItemRef) -> bool:
        return self._states[ref.request_id].item_ready[ref.item]

    def _producers(self, keys: Iterable[CacheKey], step: _Step) -> dict[CacheKey, ItemRef]:
        """For each key its first live user with pixels; a key whose users all left meanwhile drops out."""
        producers = {}
        for key in keys:
            users = [*self._bound.get(key, ()), *([step.ahead[key]] if key in step.ahead else [])]
            alive = [ref for ref in users if ref.request_id in self._states]
            able = [ref for ref in alive if self._states[ref.request_id].item_pixels[ref.item]]
            if able:
                producers[key] = able[0]
        return producers

    def _encode_item(self, key: CacheKey, ref: ItemRef) -> EncodeItem:
        load = self._states[ref.request_id].items[ref.item].load
        return EncodeItem(ref.request_id, ref.item, key, load, self.cache.slots(key))

    def _batch(self, producers: dict[CacheKey, ItemRef]) -> EncodeBatch:
        items = tuple(self._encode_item(key, ref) for key, ref in producers.items())
        total = EncoderLoad.total(item.load for item in items)
        return EncodeBatch(items, total, self.ladder.fit(total))
