# SPDX-License-Identifier: Apache-2.0
"""Claim: the row cache accounts for every row, evicts the least recently used, and never gives a row to two entries."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmjax.encoder.cache import Acquired, EntryState, RowCache

ROW = 4  # bytes


def cache_of(nbytes: int) -> RowCache:
    return RowCache(nbytes // ROW, ROW)


def commit(cache: RowCache, key, rows: int) -> None:
    cache.allocate([key])
    cache.commit(key, rows)


def test_a_pool_without_rows_is_refused():
    with pytest.raises(ValueError, match="0 rows"):
        RowCache(0, ROW)


def test_put_get_and_pop():
    cache = cache_of(16)
    slots = cache.put("a", 4)
    assert sorted(slots) == [0, 1, 2, 3]
    np.testing.assert_array_equal(cache.get("a"), slots)
    assert not cache.get("a").flags.writeable
    np.testing.assert_array_equal(cache.pop("a"), slots)
    assert cache.pop("a") is None
    assert cache.stats().current_bytes == 0


def test_clear_refuses_while_rows_are_claimed():
    cache = cache_of(16)
    cache.acquire("a", 2)
    with pytest.raises(RuntimeError):
        cache.clear()
    commit(cache, "a", 2)
    with pytest.raises(RuntimeError):
        cache.clear()
    cache.release("a")
    cache.clear()
    assert cache.stats().items == 0


def test_counts_of_miss_put_get_and_replace():
    cache = cache_of(64)
    cache.get("a")
    cache.put("a", 2)
    cache.get("a")
    cache.put("a", 2)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.insertions, stats.replacements, stats.hit_rate) == (1, 1, 1, 1, 0.5)
    cache.get("a", record_stats=False)
    assert cache.stats() == stats


def test_oldest_goes_first_and_oversize_is_rejected():
    cache = cache_of(16)
    for key in "abc":
        assert cache.put(key, 2) is not None
    assert cache.put("d", 5) is None
    stats = cache.stats()
    assert (stats.items, stats.evictions, stats.rejected) == (2, 1, 1)
    assert cache.get("a") is None


def test_a_snapshot_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache_of(16).stats().hits = 1


def test_get_promotes():
    cache = cache_of(16)
    cache.put("a", 2)
    cache.put("b", 2)
    cache.get("a")
    cache.put("c", 2)
    assert cache.get("a") is not None
    assert cache.get("b") is None


def test_replacing_by_a_larger_entry():
    cache = cache_of(16)
    cache.put("a", 2)
    assert len(cache.put("a", 3)) == 3
    assert cache.stats().current_bytes == 12
    assert cache.put("a", 5) is None
    assert len(cache.get("a")) == 3


def test_threads_stay_within_capacity():
    cache = cache_of(64)

    def fill(thread: int) -> None:
        for i in range(64):
            cache.put((thread, i), 2)

    threads = [threading.Thread(target=fill, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert stats.items <= 8
    assert stats.insertions == 512
    assert stats.current_bytes == 8 * stats.items


def test_two_users_of_one_reservation():
    cache = cache_of(16)
    assert cache.acquire("a", 2) is Acquired.NEW_RESERVATION
    assert cache.acquire("a", 2) is Acquired.RESERVATION_HIT
    stats = cache.stats()
    assert (stats.reserved_bytes, stats.misses, stats.producer_misses, stats.inflight_dedup) == (8, 1, 1, 1)
    assert cache.get("a", record_stats=False) is None
    commit(cache, "a", 2)
    assert (cache.stats().in_use_bytes, cache.stats().reserved_bytes, cache.stats().insertions) == (8, 0, 1)
    cache.release("a")
    cache.release("a")
    assert (cache.stats().current_bytes, cache.stats().in_use_bytes) == (8, 0)
    assert cache.acquire("a", 2) is Acquired.READY_HIT
    assert cache.stats().hits == 1


@pytest.mark.parametrize("ready", [False, True])
def test_an_entry_not_retained_goes_with_its_last_user(ready):
    cache = cache_of(16)
    cache.acquire("a", 2, retain_after_release=False)
    if ready:
        commit(cache, "a", 2)
    cache.release("a")
    assert cache.state("a") is None
    assert cache.stats().current_bytes == 0
    with pytest.raises(RuntimeError, match="no reference"):
        cache.release("a")


def test_reservations_come_before_what_nobody_holds():
    cache = cache_of(16)
    cache.put("old 1", 2)
    cache.put("old 2", 2)
    assert cache.acquire("new 1", 2) is Acquired.NEW_RESERVATION
    assert cache.acquire("new 2", 2) is Acquired.NEW_RESERVATION
    assert cache.put("x", 2) is None
    assert cache.acquire("old 1", 2) is None
    cache.ensure_capacity(4)
    assert cache.stats().evictions == 2
    cache.allocate(["new 1", "new 2"])
    cache.commit("new 1", 2)
    cache.commit("new 2", 2)
    assert cache.stats().current_bytes == 16


def test_room_that_cannot_be_made_changes_nothing():
    cache = cache_of(16)
    cache.put("idle", 2)
    cache.acquire("held", 2)
    commit(cache, "held", 2)
    with pytest.raises(RuntimeError, match="3 rows"):
        cache.ensure_capacity(3)
    assert cache.get("idle") is not None
    with pytest.raises(ValueError, match="-1"):
        cache.ensure_capacity(-1)


def test_wrong_uses_are_refused():
    cache = cache_of(16)
    for rows in (0, 5):
        with pytest.raises(ValueError, match=str(rows)):
            cache.acquire("a", rows)
    cache.acquire("a", 2)
    with pytest.raises(ValueError, match="2 rows"):
        cache.acquire("a", 3)
    with pytest.raises(ValueError, match="retain"):
        cache.acquire("a", 2, retain_after_release=False)
    with pytest.raises(RuntimeError, match="no row slots"):
        cache.commit("a", 2)
    cache.allocate(["a"])
    with pytest.raises(ValueError, match="got 3"):
        cache.commit("a", 3)
    with pytest.raises(RuntimeError, match="reserved"):
        cache.put("a", 2)
    with pytest.raises(RuntimeError, match="references"):
        cache.pop("a")
    cache.commit("a", 2)
    with pytest.raises(RuntimeError, match="not reserved"):
        cache.commit("a", 2)


def test_freed_rows_far_apart_serve_one_entry():
    cache = cache_of(24)
    for key in "abcdef":
        cache.put(key, 1)
    cache.pop("b"), cache.pop("e")
    assert sorted(cache.put("g", 2)) == [1, 4]


class CacheMachine(RuleBasedStateMachine):
    """Random calls against a model that knows only references and sizes."""

    def __init__(self):
        super().__init__()
        self.cache = RowCache(12, ROW)
        self.refs: dict[int, int] = {}  # references that we hold, by key

    keys = st.integers(0, 7)

    @staticmethod
    def rows(key: int) -> int:
        return 1 + key % 5

    @rule(key=keys)
    def acquire(self, key):
        claimed, state, held = self.cache.claimed_rows, self.cache.state(key), self.cache.references(key)
        got = self.cache.acquire(key, self.rows(key), retain_after_release=key != 3)
        fits = held > 0 or claimed + self.rows(key) <= 12
        assert (got is not None) == fits
        if got is None:
            return
        expected = {None: Acquired.NEW_RESERVATION, EntryState.RESERVED: Acquired.RESERVATION_HIT}
        assert got is expected.get(state, Acquired.READY_HIT)
        self.refs[key] = self.refs.get(key, 0) + 1

    @rule()
    def allocate(self):
        self.cache.allocate([key for key in self.refs if self.cache.state(key) is EntryState.RESERVED])

    @rule(key=keys)
    def commit(self, key):
        if self.cache.state(key) is EntryState.RESERVED:
            self.cache.allocate([key])
            self.cache.commit(key, self.rows(key))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(self.refs)))
        self.cache.release(key)
        self.refs[key] -= 1
        if not self.refs[key]:
            del self.refs[key]

    @rule(key=keys)
    def put(self, key):
        if key == 3 or self.refs.get(key):
            return
        fits = self.cache.claimed_rows + self.rows(key) <= 12
        assert (self.cache.put(key, self.rows(key)) is not None) == fits

    @rule(key=keys)
    def get(self, key):
        assert (self.cache.get(key) is not None) == (self.cache.state(key) is EntryState.READY)

    @rule(key=keys)
    def pop(self, key):
        if not self.refs.get(key):
            self.cache.pop(key)
            assert self.cache.state(key) is None

    @invariant()
    def accounts_agree(self):
        live = {key: self.cache.state(key) for key in range(8) if self.cache.state(key)}
        ready = [key for key, state in live.items() if state is EntryState.READY]
        stats = self.cache.stats()
        assert stats.current_bytes == ROW * sum(map(self.rows, ready))
        assert stats.in_use_bytes == ROW * sum(self.rows(key) for key in ready if self.refs.get(key))
        assert stats.reserved_bytes == ROW * sum(self.rows(key) for key in live if key not in ready)
        assert stats.items == len(ready)
        assert self.cache.claimed_rows <= 12
        assert all(self.cache.references(key) == self.refs.get(key, 0) for key in range(8))

    @invariant()
    def slots_are_never_shared(self):
        owned = [self.cache.slots(key) for key in range(8) if self.cache.slots(key) is not None]
        rows = np.concatenate(owned) if owned else np.empty(0, int)
        assert len(set(rows.tolist())) == len(rows) <= 12
        assert all(
            len(self.cache.slots(key)) == self.rows(key) for key in range(8) if self.cache.slots(key) is not None
        )

    def teardown(self):
        for key, count in self.refs.items():
            for _ in range(count):
                self.cache.release(key)
        assert self.cache.claimed_rows == 0
        self.cache.clear()
        assert sorted(self.cache.put("all", 12)) == list(range(12))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
