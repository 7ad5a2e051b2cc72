# SPDX-License-Identifier: Apache-2.0
"""The first plane's scheduler: which tokens run in the next step.

First come, first served. Running sequences decode one token each; what is left of the step's tokens goes to prompt
chunks, running requests before waiting ones. When pages run out the newest running request is preempted: it gives back
pages and rows, waits at the head of the queue, and later computes prompt and output again as one prompt.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter

from mmjax.config import EngineConfig
from mmjax.encoder.plan import EncodePlan
from mmjax.encoder.scheduler import EncoderSchedulingPolicy, MultimodalItemScheduler
from mmjax.engine.batch import Chunk
from mmjax.engine.embedding import encoder_item
from mmjax.engine.pages import PageAllocator
from mmjax.engine.request import Request, Status

_arrival = attrgetter("arrival")


@dataclass
class Schedule:
    """One step's work: prompt chunks, sequences that decode, items to encode; requests that lack pixels to go on."""

    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    encode: EncodePlan | None = None
    lacking: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns the queues, the slots and the page tables of requests; one thread uses it.

    Items of the first `max_ahead` requests are encoded before a chunk needs them, if a step has encoder budget left.

    `embedding` requests want rows and no tokens: they take part in the item plane alone. `must_drain` is set when
    somebody has to be preempted but tokens are in flight: the engine reads them before it schedules again.
    """

    def __init__(
        self,
        config: EngineConfig,
        pages: PageAllocator,
        items: MultimodalItemScheduler,
        *,
        encoder_cap_while_decoding: int | None = None,
        max_ahead: int = 0,
    ):
        self.config, self.pages, self.items = config, pages, items
        self.waiting: list[Request] = []  # in order of arrival, as is `running`
        self.running: list[Request] = []
        self.embedding: list[Request] = []
        self.preemptions = 0
        self.must_drain = False
        self._encoder_cap, self._max_ahead = encoder_cap_while_decoding, max_ahead
        self._free_slots = list(range(config.max_batch_size))[::-1]

    # ---- requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request whose items have been admitted."""
        (self.embedding if request.embed_only else self.waiting).append(request)

    def remove(self, request: Request) -> None:
        """Takes a finished, failed or cancelled request out and gives back all it holds; harmless when repeated."""
        self._give_back(request)
        for queue in (self.waiting, self.embedding):
            if request in queue:
                queue.remove(request)
        self.items.remove(request.id)
        request.status = Status.FINISHED

    def preempt(self, request: Request) -> None:
        """Puts a running request back to its place in the queue, without pages and rows. Its output stays."""
        self._give_back(request)
        self.items.release(request.id)
        request.status = Status.PREEMPTED
        request.computed, request.begun = 0, False
        request.prefill_end = request.prompt_len + len(request.output_ids)
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=_arrival)

    def _give_back(self, request: Request) -> None:
        if request not in self.running:
            return
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self.pages.free(request.table)
        request.slot, request.registered = None, 0

    # ---- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """The next step; empty if nothing can run."""
        step = Schedule()
        self.must_drain = False
        for request in list(self.running):
            decodes = not request.prefilling and request.wants_more
            if request.status is Status.RUNNING and decodes and self._room_for(request, request.computed + 1):
                step.decodes.append(request)
        self.items.begin(self._encoder_cap if step.decodes else None)
        if self.items.policy is EncoderSchedulingPolicy.EAGER:
            self.items.look_ahead(self._in_line())
        self._schedule_chunks(step, self.config.chunk_tokens - len(step.decodes))
        self.items.look_ahead(islice(self._in_line(), self._max_ahead))
        step.encode = self.items.close()
        # Making room for a chunk may have preempted a request that was to decode or to prefill.
        step.decodes = [request for request in step.decodes if request.status is Status.RUNNING]
        step.chunks = self._within_rows(step.chunks, step.encode.chunk_end)
        return step

    def _schedule_chunks(self, step: Schedule, budget: int) -> None:
        """Claims rows and tokens in order of arrival; once the step is full, only for requests that want rows alone."""
        prefilling = [request for request in self.running if request.prefilling]
        newcomers = self._newcomers()
        for request in self._in_order([*prefilling, *newcomers, *self.embedding]):
            if request.embed_only:
                if not request.restoring:
                    self.items.claim(request.id, request.computed, request.prompt_len)
                continue
            if budget <= 0 or len(step.chunks) == self.config.max_prefill_sequences:
                continue
            if request.status is not Status.RUNNING and (request not in newcomers or not self._start(request, step)):
                newcomers = []  # first come, first served: nobody passes the head of the queue
                continue
            if request.status is not Status.RUNNING:
                continue  # its pixels have to be decoded again
            wanted = min(request.prefill_end, request.computed + budget)
            if wanted < request.prefill_end and self._must_be_whole(request):
                budget = 0  # nor do younger ones take the tokens that it waits for
                continue
            end = self.items.claim(request.id, request.computed, wanted).end
            if end <= request.computed:
                continue
            if self._room_for(request, end):
                step.chunks.append(Chunk(request, request.computed, end))
                budget -= end - request.computed
            else:
                budget = 0  # nobody younger takes the pages that it lacks

    def _must_be_whole(self, request: Request) -> bool:
        """Whether its prefill may not be split: any that a step can hold, without chunked prefill.

        What was answered before a preemption can make it longer than that.
        """
        return not self.config.enable_chunked_prefill and (
            request.prefill_end - request.computed <= self.config.chunk_tokens
        )

    def _newcomers(self) -> list[Request]:
        """Waiting requests that may start, at most one a free slot: however long the queue is, a step looks no further.

        Those whose pixels are being decoded again stand aside: they do not run, and they do not block others. Where
        requests wait for all of their items, the encoder says how many may start.
        """
        ready = list(islice((r for r in self.waiting if not r.restoring), len(self._free_slots)))
        loads = [[encoder_item(item).load for item in request.prompt.items] for request in ready]
        return ready[: self.items.gate([request.id for request in self.running], loads)]

    def _in_line(self) -> Iterator[str]:
        return (request.id for request in chain(self.running, self.waiting))

    def _in_order(self, requests: Sequence[Request]) -> list[Request]:
        by_id = {request.id: request for request in sorted(requests, key=_arrival)}
        return [by_id[request_id] for request_id in self.items.order(list(by_id))]

    def _start(self, request: Request, step: Schedule) -> bool:
        """Gives a newcomer a slot and what the prefix cache holds for it; False if it has to wait.

        One whose pixels have to be decoded again does not run either, but neither does it make others wait.
        """
        limit = request.prefill_end - 1  # the last token is always computed: its logits are needed
        table, cached = self.pages.match(request.block_keys, request.key_tokens, limit)
        request.lacking = self.items.lacking_pixels(request.id, cached)
        missing = self.pages.blocks_for(min(request.prefill_end, cached + self.config.chunk_tokens)) - len(table)
        if request.lacking or missing > self.pages.available:
            self.pages.undo_match(table)
            step.lacking += [request] if request.lacking else []
            return bool(request.lacking)
        self.waiting.remove(request)
        insort(self.running, request, key=_arrival)
        request.slot = self._free_slots.pop()
        request.table, request.computed = table, cached
        request.status = Status.RUNNING
        request.note_started(cached)
        return True

    def _room_for(self, request: Request, end: int) -> bool:
        """Extends the request's pages to `end` positions, preempting the youngest, in the end the request itself.

        Nobody is preempted while tokens are in flight, which would be lost: the request sits this step out.
        """
        while not self.pages.ensure(request.table, end):
            if any(r.in_flight for r in self.running):
                self.must_drain = True
                return False
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _within_rows(self, chunks: Sequence[Chunk], chunk_end: dict[str, int]) -> list[Chunk]:
        kept = []
        for chunk in chunks:
            end = min(chunk.end, chunk_end.get(chunk.request.id, chunk.end))
            if chunk.request.status is Status.RUNNING and end > chunk.begin:
                kept.append(Chunk(chunk.request, chunk.begin, end))
        return kept
