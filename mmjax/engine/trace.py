# SPDX-License-Identifier: Apache-2.0
"""What each step did: always timed, on request kept row by row and saved as a Chrome / Perfetto trace or drawn."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmjax.engine.scheduler import Schedule

_TIMES = 2048  # durations of steps, and as many gaps between tokens, kept for percentiles


@dataclass
class StepRow:
    """One step: seconds since the engine started, work by kind, caches afterwards.

    Attributes:
      chunks: (request id, first position, end) of each prompt chunk.
      items: (request id, item index) of each item encoded; `hits` found their rows in the cache, `writes` brought them.
      tokens_left, encoder_tokens_left: what the step did not use of its token budget and of budget B.
      encoder_tokens: attention tokens encoded, `encoder_padded` with the padding of their buckets.
    """

    index: int
    begin: float
    end: float = 0.0
    chunks: list[tuple[str, int, int]] = field(default_factory=list)
    decodes: int = 0
    items: list[tuple[str, int]] = field(default_factory=list)
    hits: int = 0
    writes: int = 0
    tokens_left: int = 0
    encoder_tokens: int = 0
    encoder_tokens_left: int = 0
    encoder_padded: int = 0
    rows_in_use: int = 0
    row_evictions: int = 0
    pages_in_use: int = 0
    page_evictions: int = 0
    waiting: int = 0
    running: int = 0

    def scheduled(self, schedule: Schedule) -> None:
        """Notes what the schedulers decided."""
        self.chunks = [(chunk.request.id, chunk.begin, chunk.end) for chunk in schedule.chunks]
        self.decodes = len(schedule.decodes)
        plan = schedule.encode
        self.items = [(item.request_id, item.item) for item in plan.items]
        self.hits, self.writes = len(plan.hits), len(plan.writes)
        self.encoder_tokens = sum(batch.load.tokens for batch in plan.batches)
        self.encoder_padded = sum(batch.bucket.key.total_tokens for batch in plan.batches)


class StepTrace:
    """Times every step; keeps rows of the last `limit` steps (0: none)."""

    def __init__(self, limit: int = 0):
        self.rows: deque[StepRow] = deque(maxlen=limit)
        self.times: deque[float] = deque(maxlen=_TIMES)
        self.gaps: deque[float] = deque(maxlen=_TIMES)  # between two tokens of one answer, as its reader sees them
        self.steps = 0
        self._start = time.perf_counter()

    @contextmanager
    def step(self, engine: Any) -> Iterator[StepRow]:
        """Brackets one step; steps that did nothing leave no row."""
        row = StepRow(self.steps, time.perf_counter() - self._start)
        yield row
        if not (row.chunks or row.decodes or row.items or row.hits or row.writes):
            return
        row.end = time.perf_counter() - self._start
        self.times.append(row.end - row.begin)
        self.steps += 1
        if self.rows.maxlen:
            cache, pages = engine.items.cache.stats(), engine.pages.stats()
            tokens = row.decodes + sum(end - begin for _, begin, end in row.chunks)
            row.tokens_left = engine.scheduler.config.chunk_tokens - tokens
            row.encoder_tokens_left = max(0, engine.items.budgets.max_num_tokens - row.encoder_tokens)
            row.rows_in_use = cache.in_use_bytes // engine.items.cache.row_bytes
            row.row_evictions = cache.evictions
            row.pages_in_use, row.page_evictions = pages.in_use, pages.evictions
            row.waiting, row.running = len(engine.scheduler.waiting), len(engine.scheduler.running)
            self.rows.append(row)

    def note_token(self, previous: float | None) -> float:
        """The time now, at which a token was read whose predecessor was read at `previous`."""
        now = time.perf_counter()
        if previous is not None:
            self.gaps.append(now - previous)
        return now

    def save(self, path: str | Path) -> Path:
        """Writes a JSON trace that chrome://tracing and ui.perfetto.dev open; times are host times of dispatch."""
        events = []
        for row in self.rows:
            common = {"pid": 0, "ts": row.begin * 1e6, "dur": (row.end - row.begin) * 1e6}
            events.append({"name": f"step {row.index}", "ph": "X", "tid": 0, "args": asdict(row), **common})
            for request_id, begin, end in row.chunks:
                name = f"prefill {request_id} [{begin}, {end})"
                events.append({"name": name, "ph": "X", "tid": 1, **common})
            if row.items:
                events.append({"name": f"encode {len(row.items)} items", "ph": "X", "tid": 2, **common})
            if row.decodes:
                events.append({"name": f"decode {row.decodes}", "ph": "X", "tid": 3, **common})
            counters = {"rows": row.rows_in_use, "pages": row.pages_in_use}
            events.append({"name": "in use", "ph": "C", "pid": 0, "ts": common["ts"], "args": counters})
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": events}))
        return path

    def plot(self, axes: Any = None) -> Any:
        """Draws tokens of each step by kind over time, and rows in use; returns the matplotlib axes."""
        import matplotlib.pyplot as plt

        axes = axes or plt.subplots(figsize=(9, 3))[1]
        begin = [row.begin for row in self.rows]
        prefill = [sum(end - start for _, start, end in row.chunks) for row in self.rows]
        axes.step(begin, prefill, label="prefill tokens", where="post")
        axes.step(begin, [row.decodes for row in self.rows], label="decoding sequences", where="post")
        axes.step(begin, [row.encoder_tokens for row in self.rows], label="encoder tokens", where="post")
        axes.step(begin, [row.rows_in_use for row in self.rows], label="embedding rows in use", where="post")
        axes.set_xlabel("seconds")
        axes.legend(fontsize="small")
        return axes
