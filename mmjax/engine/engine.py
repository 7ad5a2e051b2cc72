# SPDX-License-Identifier: Apache-2.0
"""The engine loop: one thread that owns both planes, schedules steps, dispatches them and reads their tokens.

Dispatch is asynchronous. With overlap the tokens of a step are read while the next one runs: sampled ids stay on the
device, and an answer that ended is noticed one step late, its surplus token thrown away.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from mmjax.encoder.plan import EncodeBatch, EncodeItem, ItemRef
from mmjax.encoder.step import MultimodalEncoderContractError, MultimodalEncoderRequestError
from mmjax.engine.embedding import RowReader, encoder_item
from mmjax.engine.mailbox import Mailbox
from mmjax.engine.pixels import PixelRestorer
from mmjax.engine.prefix import register_pages
from mmjax.engine.request import Request, Status
from mmjax.engine.scheduler import Schedule, Scheduler
from mmjax.engine.trace import StepTrace
from mmjax.errors import DeviceError, EngineError, MMJaxError, RequestError
from mmjax.inputs.items import ProcessedItem
from mmjax.inputs.prompt import PromptItem
from mmjax.outputs import FinishReason, TokenLogprobs

logger = logging.getLogger(__name__)


class TextRunner(Protocol):
    """The device side of the first plane; see `mmjax.engine.runner.ModelRunner`."""

    def allocate(self) -> None: ...
    def begin(self, request: Request) -> None: ...
    def prefill(self, chunks: list, row_slots: Callable) -> Any: ...
    def decode(self, requests: list[Request]) -> Any: ...


class Engine:
    """Runs requests. `submit`, `cancel` and `call` may be used from any thread, everything else from the engine's own.

    Args:
      text, encoder: the runners; `text` is None in an engine that only encodes.
      media: threads that decode items again after a preemption.
      restore: makes the patches of an item, or of some parts of one, anew from its source.
      overlap: read a step's tokens after the next step was dispatched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        text: TextRunner | None,
        encoder: Any,
        media: Executor,
        restore: Callable[[list[PromptItem]], Sequence[Any]],
        *,
        overlap: bool = True,
        trace: StepTrace | None = None,
    ):
        self.scheduler, self.text, self.encoder = scheduler, text, encoder
        self.items, self.pages = scheduler.items, scheduler.pages
        self.trace = trace or StepTrace()
        self.pixels = PixelRestorer(
            media,
            restore,
            post=lambda message: self._inbox.post(message),
            there=lambda request_id, item: self.items.set_pixels(request_id, item, True),
            failed=lambda request, error: self._finish(request, "error", error),
        )
        self._depth = 1 if overlap else 0
        self._pending: deque[Any] = deque()
        self._requests: dict[str, Request] = {}
        self._inbox = Mailbox()
        self._arrivals = itertools.count()
        self._rows = RowReader(self.items, encoder)
        self._stopping = False
        self._fruitless_recoveries = 0
        self._thread = threading.Thread(target=self._loop, name="mmjax-engine", daemon=True)

    # ---- any thread -----------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        self._thread.start()
        return self

    def submit(self, request: Request) -> None:
        """Queues a request; its handle tells the rest. Raises EngineError once the engine is closed."""
        if not self._inbox.post(partial(self._admit, request)):
            raise EngineError("the engine was closed")

    def cancel(self, request_id: str) -> None:
        """Ends a request with finish_reason "cancelled"; harmless if it has ended."""
        self._inbox.post(partial(self._cancel, request_id))

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` between two steps and returns what it returns; raises what it raises."""
        if threading.current_thread() is self._thread or not self._started:
            return function()
        future = self._inbox.ask(function)
        if future is None:
            self._thread.join()
            return function()
        return future.result()

    def close(self) -> None:
        """Cancels what is left and ends the thread."""
        if self._started:
            self._inbox.post(self._stop)
            self._thread.join()

    @property
    def _started(self) -> bool:
        return self._thread.ident is not None

    # ---- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        idle, reason = True, "error"
        try:
            while not self._stopping:
                try:
                    idle = self._turn(idle)
                except Exception as error:
                    logger.exception("the engine failed")
                    self._fail_all(EngineError(f"the engine failed: {error!r}"))
                    self._start_over()
                    idle = True
            reason = "cancelled"
        finally:
            self._stopping = True
            self._inbox.shut()
            while not self._inbox.empty():
                with _logged("a message to an engine that ends"):
                    self._inbox.deliver(wait=False)
            self._fail_all(EngineError("the engine was closed"), reason=reason)

    def _turn(self, idle: bool) -> bool:
        """Reads messages, waiting for one if `idle`, and takes a step; True if there is nothing left to do."""
        self._inbox.deliver(wait=idle)
        try:
            return not self.step()
        except DeviceError as error:
            self._recover(error)
            return False

    def _stop(self) -> None:
        self._stopping = True

    def step(self) -> bool:
        """Schedules and dispatches one step and reads an earlier one; False if there is nothing to do."""
        if self.scheduler.must_drain:
            self._collect(keep=0)
        with self.trace.step(self) as row:
            schedule = self.scheduler.schedule()
            row.scheduled(schedule)
            waiting_for_pixels = self._restore_pixels(schedule)
            worked = self._dispatch(schedule)
        in_flight = bool(self._pending)
        self._collect(keep=self._depth if worked else 0)
        if not (worked or in_flight or waiting_for_pixels):
            return self._unblock()
        return worked or in_flight

    def _dispatch(self, schedule: Schedule) -> bool:
        """Queues the step's executables on the device: decode first, so that running answers go on soonest."""
        if schedule.decodes:
            self._pending.append(self.text.decode(schedule.decodes))
            for request in schedule.decodes:
                request.computed += 1
                request.in_flight += 1
        encoded = self._encode(schedule)
        delivered = self._deliver_rows(schedule)
        chunks = [chunk for chunk in schedule.chunks if chunk.request.status is Status.RUNNING]
        if chunks:
            self._prefill(chunks)
        return bool(schedule.decodes or encoded or delivered or chunks)

    def _prefill(self, chunks: list) -> None:
        for chunk in chunks:
            if not chunk.request.begun:
                self.text.begin(chunk.request)
                chunk.request.begun = True
        try:
            result = self.text.prefill(chunks, lambda request, item: self.items.row_slots(request.id, item))
        except RequestError as error:  # rows and positions of one request disagree; the others go on in the next step
            if error.request_id not in self._requests:
                raise
            self._finish(self._requests[error.request_id], "error", error)
            return
        self._pending.append(result)
        for chunk in chunks:
            request = chunk.request
            request.computed = chunk.end
            if chunk.completes:
                request.in_flight += 1
                request.metrics.prefill = request.metrics.prefill or request.elapsed()
            self.items.advance(request.id, chunk.end)
            register_pages(self.pages, request)

    # ---- items ----------------------------------------------------------------------------------------------------

    def _encode(self, schedule: Schedule) -> bool:
        """Dispatches the plan's batches and makes their rows readable. Failures before dispatch fail their requests."""
        plan = schedule.encode
        try:
            packed = [(batch, self._pack(batch)) for batch in plan.batches]
            for batch, inputs in packed:
                self.encoder.encode(inputs, [entry.slots for entry in batch.items], batch.bucket)
            for entry in plan.writes:
                self.encoder.write(self._item(entry).embedding, entry.slots)
        except MultimodalEncoderRequestError as error:
            for request_id in self.items.fail(plan, error):
                self._finish(self._requests[request_id], "error", error)
            schedule.chunks = [part for chunk in schedule.chunks if (part := self._with_ready_rows(chunk)) is not None]
            plan.chunk_end.clear()
            return True
        made = {(item.request_id, item.item) for item in (*plan.items, *plan.writes)}
        for ref in self.items.commit(plan):
            self._pin(ref, cached=ref not in made)
        return bool(plan)

    def _pack(self, batch: EncodeBatch) -> Any:
        """Host arrays of a batch. Raises MultimodalEncoderContractError, which names the requests at fault."""
        items = [ProcessedItem(item.plan, item.patches) for item in map(self._item, batch.items)]
        try:
            return self.encoder.pack(items, batch.bucket)
        except Exception as error:
            owners = [e.request_id for e, item in zip(batch.items, items, strict=True) if not self._packs(item, batch)]
            owners = owners or [e.request_id for e in batch.items]  # without ids, other batches were to blame too
            raise MultimodalEncoderContractError(f"an item can't be packed: {error!r}", owners) from error

    def _packs(self, item: ProcessedItem, batch: EncodeBatch) -> bool:
        """Whether an item alone can be packed: in a batch that can't, those that fail are to blame."""
        try:
            self.encoder.pack([item], batch.bucket)
        except Exception:
            return False
        return True

    def _item(self, ref: ItemRef | EncodeItem) -> PromptItem:
        return self._requests[ref.request_id].prompt.items[ref.item]

    def _with_ready_rows(self, chunk):
        end = self.items.ready_end(chunk.request.id, chunk.begin, chunk.end)
        return type(chunk)(chunk.request, chunk.begin, end) if end > chunk.begin else None

    def _pin(self, ref: ItemRef, *, cached: bool) -> None:
        """The item's rows are held for its request: its pixels can go, its source stays."""
        request, item = self._requests[ref.request_id], self._item(ref)
        if cached:
            request.metrics.items_cached += 1
        elif item.embedding is None:
            request.metrics.items_encoded += 1
        request.metrics.encode = request.elapsed()
        if item.patches is not None and item.source is not None:
            item.patches = None
            self.items.set_pixels(request.id, ref.item, False)

    def _deliver_rows(self, schedule: Schedule) -> bool:
        delivered = False
        for request in list(self.scheduler.embedding):
            end = schedule.encode.chunk_end.get(request.id, request.computed)
            if end > request.computed:
                delivered = True
                self._rows.read(request, end)
                self._fruitless_recoveries = 0
                if request.computed >= request.prompt_len:
                    self._finish(request, "stop")
        return delivered

    def _restore_pixels(self, schedule: Schedule) -> bool:
        """Sends items without pixels back to the media threads; True while any request waits for them.

        A request that runs can lack them too: rows that it counted on when it was resumed may be gone since.
        """
        for ref in schedule.encode.lacking_pixels:
            request = self._requests[ref.request_id]
            if ref.item not in request.lacking:
                request.lacking.append(ref.item)
            schedule.lacking.append(request)
        return self.pixels.send(schedule.lacking)

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def _collect(self, *, keep: int) -> None:
        """Reads steps until at most `keep` are in flight."""
        while len(self._pending) > keep:
            result = self._pending.popleft()
            sampled = result.read()
            for row, request in zip(result.rows, result.requests, strict=True):
                request.in_flight -= 1
                if request.status is Status.RUNNING:
                    self._accept(request, row, sampled)

    def _accept(self, request: Request, row: int, sampled: Any) -> None:
        self._fruitless_recoveries = 0
        request.token_at = self.trace.note_token(request.token_at)
        reason = request.accept(int(sampled.tokens[row]), TokenLogprobs.read(sampled, row, request.params.logprobs))
        if reason is not None:
            self._finish(request, reason)

    # ---- requests -------------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        try:
            if self._stopping:
                raise EngineError("the engine was closed")
            self.items.admit(request.id, [encoder_item(item) for item in request.prompt.items])
            for item in request.prompt.items:
                self.items.set_pixels(request.id, item.index, item.patches is not None or item.embedding is not None)
        except Exception as error:  # nobody knows of the request yet, so nobody else would tell its caller
            failure = error if isinstance(error, MMJaxError) else EngineError(f"the request can't be taken: {error!r}")
            request.handle.finish(request.output("error", failure))
            return
        self._requests[request.id] = request
        self.scheduler.add(request)

    def _cancel(self, request_id: str) -> None:
        if request_id in self._requests:
            self._finish(self._requests[request_id], "cancelled")

    def _finish(self, request: Request, reason: FinishReason, error: MMJaxError | None = None) -> None:
        if self._requests.pop(request.id, None) is None:
            return
        self.pixels.forget(request)
        if isinstance(error, RequestError):
            error = copy.copy(error)  # several requests may fail of one error, each with its own id
            error.request_id = request.id
        try:
            if request.status is Status.RUNNING and reason != "error":
                register_pages(self.pages, request)
            self.scheduler.remove(request)
        finally:
            if reason == "cancelled":
                request.flush()
            request.handle.finish(request.output(reason, error))

    def _unblock(self) -> bool:
        """Nothing could be scheduled and nothing will change: somebody has to go, with a reason."""
        stuck = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.embedding]
        if not stuck:
            return False
        request = min(stuck, key=lambda r: r.arrival)
        pages, rows = self.pages.stats(), self.items.cache.stats()
        self._finish(
            request,
            "error",
            EngineError(
                f"request {request.id} can't go on: {request.computed} of {request.prefill_end} positions are done, "
                f"{pages.free + pages.cached} of {pages.num_blocks} pages are free, "
                f"{rows.in_use_bytes} of {rows.max_bytes} row bytes are in use"
            ),
        )
        return True

    def _fail_all(self, error: MMJaxError, reason: FinishReason = "error") -> None:
        self._pending.clear()
        for request in list(self._requests.values()):
            with _logged(f"request {request.id}, while all requests end"):
                self._finish(request, reason, error if reason == "error" else None)

    def _recover(self, error: DeviceError) -> None:
        """After a device error: new arrays, empty caches, everybody starts again; twice in a row is once too often."""
        logger.error("device error, starting over: %s", error)
        self._fruitless_recoveries += 1
        self._pending.clear()
        for request in self._requests.values():
            request.in_flight = 0
        if self._fruitless_recoveries > 1:
            self._fruitless_recoveries = 0
            self._fail_all(error)
        for request in list(self.scheduler.running)[::-1]:
            self.scheduler.preempt(request)
        self._start_over()

    def _start_over(self) -> None:
        """New arrays and empty caches; nobody runs."""
        self.items.reset()
        self.pages.clear()
        self.encoder.allocate()
        if self.text is not None:
            self.text.allocate()


@contextmanager
def _logged(where: str) -> Iterator[None]:
    """Lets the last rites of the others go on when those of one go wrong."""
    try:
        yield
    except Exception:
        logger.exception("%s", where)
