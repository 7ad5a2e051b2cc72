# SPDX-License-Identifier: Apache-2.0
"""The caller's end of a request: a result to wait for, a stream to read, a way to cancel."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from mmjax.outputs import Delta, RequestOutput


class Handle:
    """Thread-safe; the engine pushes, callers wait, read or cancel."""

    def __init__(self, request_id: str, cancel: Callable[[str], None]):
        self.request_id = request_id
        self.submitted = time.perf_counter()
        self._cancel = cancel
        self._deltas: queue.SimpleQueue[Delta | RequestOutput] = queue.SimpleQueue()
        self._done = threading.Event()
        self._output: RequestOutput | None = None
        self._callbacks: list[Callable[[Delta | RequestOutput], None]] = []
        self._lock = threading.Lock()

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
        self._deltas.put(part)
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(part)

    # ---- caller's side --------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """Ends the request with finish_reason "cancelled"; tokens produced so far stay in its output."""
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
        """Calls `callback` in the engine's thread with every later delta and with the output, which comes last."""
        with self._lock:
            self._callbacks.append(callback)
            output = self._output
        if output is not None:
            callback(output)

    def stream(self) -> Iterator[Delta]:
        """Deltas as they come, once; raises the request's error where it happens; closing it cancels the request."""
        try:
            while True:
                part = self._deltas.get()
                if isinstance(part, RequestOutput):
                    if part.error is not None:
                        raise part.error
                    return
                yield part
        finally:
            if not self.done:
                self.cancel()
