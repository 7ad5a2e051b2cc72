# SPDX-License-Identifier: Apache-2.0
"""The caller's end of a request: a result to wait for, a stream to read, a way to cancel."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from mmjax.outputs import Delta, RequestOutput

logger = logging.getLogger(__name__)


class Handle:
    """Thread-safe; the engine pushes, callers wait, read or cancel.

    Deltas go to one reader: the stream, or whoever subscribed.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]):
        self.request_id = request_id
        self.submitted = time.perf_counter()
        self._cancel = cancel
        self._parts: queue.SimpleQueue[Delta | RequestOutput] = queue.SimpleQueue()
        self._done = threading.Event()
        self._output: RequestOutput | None = None
        self._subscriber: Callable[[Delta | RequestOutput], None] | None = None
        self._lock = threading.RLock()

    # ---- engine side ----------------------------------------------------------------------------------------------

    def push(self, delta: Delta) -> None:
        """Hands over what a step produced."""
        self._emit(delta)

    def finish(self, output: RequestOutput) -> None:
        """The last word; later calls change nothing."""
        with self._lock:
            if self._output is not None:
                return
            self._output = output
            self._emit(output)
        self._done.set()

    def _emit(self, part: Delta | RequestOutput) -> None:
        with self._lock:
            if self._subscriber is None:
                self._parts.put(part)
            else:
                self._tell(part)

    def _tell(self, part: Delta | RequestOutput) -> None:
        """A subscriber's failure (its event loop is gone, say) is its own, never the engine's."""
        try:
            self._subscriber(part)
        except Exception as error:
            logger.warning("a reader of request %s failed and gets no more: %r", self.request_id, error)
            self._subscriber = _nobody

    # ---- caller's side --------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """Ends the request with finish_reason "cancelled", if it still runs; tokens so far stay in its output."""
        if not self.done:
            self._cancel(self.request_id)

    def wait(self, timeout: float | None = None) -> RequestOutput:
        """The output, with the request's error inside it; raises TimeoutError when `timeout` seconds pass first."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout} s")
        return self._output

    def result(self, timeout: float | None = None) -> RequestOutput:
        """The output; raises the request's error."""
        output = self.wait(timeout)
        if output.error is not None:
            raise output.error
        return output

    def subscribe(self, callback: Callable[[Delta | RequestOutput], None]) -> None:
        """Calls `callback` with every delta that nobody has read and with the output, which comes last.

        Those that are there already come in this thread, later ones in the engine's: it must not block.
        """
        with self._lock:
            self._subscriber = callback
            while not self._parts.empty():
                self._tell(self._parts.get())

    def stream(self) -> Stream:
        """Deltas as they come, once."""
        return Stream(self, self._parts)


class Stream(Iterator[Delta]):
    """Deltas of one request. Raises the request's error where it happens; closing or dropping it cancels the request.

    A class and no generator: a generator that was never started would not notice that it is closed.
    """

    def __init__(self, handle: Handle, parts: queue.SimpleQueue):
        self._handle, self._parts = handle, parts
        self._ended = False

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        part = self._parts.get()
        if not isinstance(part, RequestOutput):
            return part
        self._ended = True
        if part.error is not None:
            raise part.error
        raise StopIteration

    def close(self) -> None:
        """Cancels the request if it still runs; there are no more deltas."""
        if not self._ended:
            self._ended = True
            self._handle.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _nobody(part: Delta | RequestOutput) -> None:
    """Takes the place of a subscriber that failed."""
