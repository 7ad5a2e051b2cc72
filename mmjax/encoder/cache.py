# SPDX-License-Identifier: Apache-2.0
"""LRU cache of encoder outputs whose entries own row slots of one fixed pool."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum, auto

import numpy as np
from jaxtyping import Int32


class EntryState(StrEnum):
    """RESERVED: counted, rows not written yet. READY: rows can be read."""

    RESERVED = auto()
    READY = auto()


class Acquired(StrEnum):
    """How `acquire` got its reference."""

    NEW_RESERVATION = auto()
    RESERVATION_HIT = auto()
    READY_HIT = auto()


@dataclass(frozen=True)
class CacheStats:
    """A snapshot. Sizes are bytes: `current` of READY entries, `in_use` of those with references."""

    max_bytes: int
    current_bytes: int
    reserved_bytes: int
    in_use_bytes: int
    items: int
    hits: int = 0
    misses: int = 0
    insertions: int = 0
    replacements: int = 0
    evictions: int = 0
    rejected: int = 0
    producer_misses: int = 0
    inflight_dedup: int = 0

    @property
    def hit_rate(self) -> float:
        looked_up = self.hits + self.misses
        return self.hits / looked_up if looked_up else 0.0


@dataclass
class _Entry:
    rows: int
    retain: bool
    state: EntryState
    references: int
    slots: Int32[np.ndarray, "R"] | None = None


class RowCache:
    """Who owns which rows of a pool of `capacity_rows` rows, each of `row_bytes` bytes. Thread-safe.

    An entry is reserved, gets its row slots (any rows of the pool, in any order), is written in place by the encoder,
    and becomes READY at `commit`. Reserved rows and rows with references ("claimed") never exceed the capacity. READY
    entries without references stay for reuse and are evicted, the least recently used first, when slots run short.
    The pool's array is somewhere else; here are indices only.
    """

    def __init__(self, capacity_rows: int, row_bytes: int):
        if capacity_rows <= 0 or row_bytes <= 0:
            raise ValueError(f"a row pool needs rows and bytes, got {capacity_rows} rows of {row_bytes} bytes")
        self.capacity_rows = capacity_rows
        self.row_bytes = row_bytes
        self._lock = threading.RLock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # least recently used first
        self._free = np.arange(capacity_rows, dtype=np.int32)[::-1].copy()  # a stack: its end is taken first
        self._num_free = capacity_rows
        self._current = self._reserved = self._in_use = 0  # rows
        self._counts: Counter[str] = Counter()

    @property
    def claimed_rows(self) -> int:
        """Rows that can't be evicted: reserved, or READY with references."""
        return self._reserved + self._in_use

    def state(self, key: Hashable) -> EntryState | None:
        entry = self._entries.get(key)
        return entry.state if entry else None

    def references(self, key: Hashable) -> int:
        entry = self._entries.get(key)
        return entry.references if entry else 0

    def slots(self, key: Hashable) -> Int32[np.ndarray, "R"] | None:
        """Row slots of an entry, read-only; None if it is absent or has no slots yet."""
        entry = self._entries.get(key)
        return entry.slots if entry else None

    def acquire(self, key: Hashable, rows: int, retain_after_release: bool = True) -> Acquired | None:
        """Takes a reference to `key`, reserving `rows` for it if it is absent; None if that would claim too much.

        Evicts nothing. Raises ValueError if `rows` can never fit, or differs from the entry's as may `retain`.
        """
        with self._lock:
            if not 0 < rows <= self.capacity_rows:
                raise ValueError(f"an entry must have 1 to {self.capacity_rows} rows, got {rows}")
            entry = self._entries.get(key)
            if entry is None:
                return self._reserve(key, rows, retain_after_release)
            if (entry.rows, entry.retain) != (rows, retain_after_release):
                raise ValueError(f"{key} has {entry.rows} rows, retain={entry.retain}; asked for {rows}")
            if entry.state is EntryState.RESERVED:
                entry.references += 1
                self._counts["inflight_dedup"] += 1
                return Acquired.RESERVATION_HIT
            if entry.references == 0:
                if self.claimed_rows + rows > self.capacity_rows:
                    return None
                self._in_use += rows
            entry.references += 1
            self._entries.move_to_end(key)
            self._counts["hits"] += 1
            return Acquired.READY_HIT

    def _reserve(self, key: Hashable, rows: int, retain: bool) -> Acquired | None:
        if self.claimed_rows + rows > self.capacity_rows:
            return None
        self._entries[key] = _Entry(rows, retain, EntryState.RESERVED, references=1)
        self._reserved += rows
        self._counts["misses"] += 1
        self._counts["producer_misses"] += 1
        return Acquired.NEW_RESERVATION

    def ensure_capacity(self, rows: int) -> None:
        """Evicts READY entries without references, oldest first, until `rows` slots are free.

        Raises RuntimeError, and changes nothing, if that is impossible.
        """
        with self._lock:
            if rows < 0:
                raise ValueError(f"can't make room for {rows} rows")
            if rows > self._num_free + self._current - self._in_use:
                raise RuntimeError(f"{rows} rows do not fit beside those in use or being written")
            idle = (k for k, e in self._entries.items() if e.state is EntryState.READY and not e.references)
            victims, room = [], self._num_free
            while room < rows:
                victims.append(next(idle))
                room += self._entries[victims[-1]].rows
            for key in victims:
                self._remove(key)
            self._counts["evictions"] += len(victims)

    def allocate(self, keys: Iterable[Hashable]) -> None:
        """Gives row slots to the reserved `keys` that have none, evicting once for all of them."""
        with self._lock:
            entries = [self._entries[key] for key in keys]
            waiting = [entry for entry in entries if entry.slots is None]
            self.ensure_capacity(sum(entry.rows for entry in waiting))
            for entry in waiting:
                entry.slots = self._take(entry.rows)

    def commit(self, key: Hashable, rows: int) -> None:
        """Makes a reserved entry READY: the encoder has written, or been told to write, `rows` rows to its slots."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.state is not EntryState.RESERVED:
                raise RuntimeError(f"{key} is not reserved")
            if rows != entry.rows:
                raise ValueError(f"{key} was reserved with {entry.rows} rows, got {rows}")
            if entry.slots is None:
                raise RuntimeError(f"{key} has no row slots yet")
            entry.state = EntryState.READY
            self._reserved -= rows
            self._current += rows
            self._in_use += rows
            self._entries.move_to_end(key)
            self._counts["insertions"] += 1

    def get(self, key: Hashable, record_stats: bool = True) -> Int32[np.ndarray, "R"] | None:
        """Row slots of a READY entry, which becomes the most recently used; takes no reference. None is a miss."""
        with self._lock:
            entry = self._entries.get(key)
            found = entry is not None and entry.state is EntryState.READY
            if record_stats:
                self._counts["hits" if found else "misses"] += 1
            if not found:
                return None
            self._entries.move_to_end(key)
            return entry.slots

    def put(self, key: Hashable, rows: int) -> Int32[np.ndarray, "R"] | None:
        """Inserts or replaces a READY entry without references; the caller writes the slots before anyone reads them.

        None (counted as rejected) if it does not fit beside the claimed rows. Raises RuntimeError for a reserved or
        referenced entry.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.references:
                raise RuntimeError(f"{key} is {entry.state} with {entry.references} references")
            if rows <= 0 or self.claimed_rows + rows > self.capacity_rows:
                self._counts["rejected"] += 1
                return None
            if entry is not None:
                self._remove(key)
            self.ensure_capacity(rows)
            slots = self._take(rows)
            self._entries[key] = _Entry(rows, True, EntryState.READY, references=0, slots=slots)
            self._current += rows
            self._counts["replacements" if entry is not None else "insertions"] += 1
            return slots

    def release(self, key: Hashable) -> None:
        """Gives one reference back. With the last one a reservation goes, and so does an entry not to be retained."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.references:
                raise RuntimeError(f"{key} has no reference to release")
            entry.references -= 1
            if entry.references:
                return
            if entry.state is EntryState.READY:
                self._in_use -= entry.rows
            if entry.state is EntryState.RESERVED or not entry.retain:
                self._remove(key)

    def pop(self, key: Hashable) -> Int32[np.ndarray, "R"] | None:
        """Removes an entry, returns the slots it had, free again now; None if absent, RuntimeError if in use."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if entry.references:
                raise RuntimeError(f"{key} has {entry.references} references")
            self._remove(key)
            return entry.slots

    def clear(self) -> None:
        """Removes everything; RuntimeError while any row is claimed."""
        with self._lock:
            if self.claimed_rows:
                raise RuntimeError(f"{self.claimed_rows} rows are reserved or in use")
            for key in list(self._entries):
                self._remove(key)

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                max_bytes=self.capacity_rows * self.row_bytes,
                current_bytes=self._current * self.row_bytes,
                reserved_bytes=self._reserved * self.row_bytes,
                in_use_bytes=self._in_use * self.row_bytes,
                items=sum(entry.state is EntryState.READY for entry in self._entries.values()),
                **self._counts,
            )

    def _take(self, rows: int) -> Int32[np.ndarray, "R"]:
        self._num_free -= rows
        slots = self._free[self._num_free : self._num_free + rows][::-1].copy()
        slots.flags.writeable = False
        return slots

    def _remove(self, key: Hashable) -> None:
        entry = self._entries.pop(key)
        if entry.state is EntryState.RESERVED:
            self._reserved -= entry.rows
        else:
            self._current -= entry.rows
        if entry.slots is not None:
            self._free[self._num_free : self._num_free + entry.rows] = entry.slots[::-1]
            self._num_free += entry.rows
