# SPDX-License-Identifier: Apache-2.0
"""The first plane's scheduler: which tokens run in the next step.

First come, first served. Running sequences decode one token each; what is left of the step's tokens goes to prompt
chunks, running requests before waiting ones. When pages run out the newest running request is preempted: it gives back
pages and rows, waits at the head of the queue, and later computes prompt and output again as one prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mmjax.config import EngineConfig
from mmjax.encoder.scheduler import EncodePlan, MultimodalItemScheduler
from mmjax.engine.batch import Chunk
from mmjax.engine.pages import PageAllocator
from mmjax.engine.request import Request, Status


@dataclass
class Schedule:
    """One step's work. `drain_first`: tokens in flight must be read before anything can be scheduled."""

    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    encode: EncodePlan | None = None
    drain_first: bool = False

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes or self.encode)


class Scheduler:
    """Owns the queues, the slots and the page tables of requests; one thread uses it."""

    def __init__(self, config: EngineConfig, pages: PageAllocator, items: MultimodalItemScheduler):
        self.config, self.pages, self.items = config, pages, items
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self._free_slots = list(range(config.max_batch_size))[::-1]
        self.preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request, status: Status = Status.FINISHED) -> None:
        """Takes a request out and gives back everything it holds; harmless when repeated."""
        if request in self.running:
            self.running.remove(request)
            self._free_slots.append(request.slot)
            self.pages.free(request.table)
            request.slot, request.table = None, []
        elif request in self.waiting:
            self.waiting.remove(request)
        self.items.release(request.id)
        request.status = status

    def schedule(self) -> Schedule:
        """The next step; empty when nothing can run."""
        step = Schedule()
        budget = self.config.chunk_tokens
        for request in list(self.running):
            if request.status is not Status.RUNNING or request.prefilling or not request.wants_more:
                continue
            if not self._make_room(request, request.computed + 1, step):
                if step.drain_first:
                    return step
                continue
            step.decodes.append(request)
        step.decodes = [r for r in step.decodes if r.status is Status.RUNNING]
        candidates = self._prefill_candidates(budget - len(step.decodes), step)
        if step.drain_first:
            return step
        step.decodes = [r for r in step.decodes if r.status is Status.RUNNING]
        self._plan_items(candidates, step)
        return step
