# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the engine: what it wants, how far it is, what it has produced."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from mmjax.engine.stop import StopChecker
from mmjax.errors import RequestError
from mmjax.inputs.prepare import PreparedPrompt
from mmjax.outputs import Delta, RequestMetrics, RequestOutput, TokenLogprobs, Usage
from mmjax.sampling_params import SamplingParams, SamplingRow


class Status(Enum):
    """Where a request stands. PREEMPTED requests wait like new ones, but keep their output."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """Scheduler and engine thread only; callers hold the `Handle`.

    Attributes:
      computed: positions whose KV is written or in flight.
      prefill_end: position at which this run's prefill ends: prompt plus what was produced before a preemption.
      in_flight: tokens sampled on the device and not read yet.
      table: KV pages in order.
      slot: row of the device's per-sequence state, None unless running.
    """

    id: str
    prompt: PreparedPrompt
    params: SamplingParams
    checker: StopChecker
    handle: Handle
    seed: int
    cache_salt: str | None = None
    status: Status = Status.WAITING
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    computed: int = 0
    prefill_end: int = 0
    in_flight: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    cached_tokens: int = 0
    preemptions: int = 0

    def __post_init__(self):
        self.prefill_end = self.prompt_len

    @property
    def prompt_len(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def prefilling(self) -> bool:
        """True until the last prompt position's KV is written or in flight."""
        return self.computed < self.prefill_end

    @property
    def scheduled_outputs(self) -> int:
        """Output tokens read plus in flight: also the index of the next random draw."""
        return len(self.output_ids) + self.in_flight

    @property
    def wants_more(self) -> bool:
        """False once tokens in flight will reach the length limit, so that no step runs past it."""
        return self.scheduled_outputs < self.checker.max_tokens

    @property
    def sampling_row(self) -> SamplingRow:
        """What the sampler needs; draws depend on the seed and the number of tokens produced, on nothing else."""
        return SamplingRow(self.params, self.seed, self.scheduled_outputs, self.checker.eos_token_ids)

    def token_ids(self, begin: int, end: int) -> np.ndarray:
        """Ids of positions [begin, end) of prompt and output, int32."""
        prompt = self.prompt.token_ids
        if end <= len(prompt):
            return prompt[begin:end]
        output = np.asarray(self.output_ids, np.int32)
        return np.concatenate([prompt, output])[begin:end]

    def positions(self, begin: int, end: int) -> np.ndarray:
        """Rotary positions [A, end - begin] int32; behind the prompt every axis reads index plus delta."""
        known = self.prompt.positions[:, begin : min(end, self.prompt_len)]
        tail = np.arange(max(begin, self.prompt_len), end, dtype=np.int32) + np.int32(self.prompt.position_delta)
        return np.concatenate([known, np.broadcast_to(tail, (known.shape[0], len(tail)))], axis=1)

    def usage(self) -> Usage:
        """Prompt tokens by kind, tokens served from the prefix cache, and tokens produced."""
        return Usage.of(self.prompt, cached_tokens=self.cached_tokens, completion_tokens=len(self.output_ids))


class Handle:
    """The caller's end of a request: a result to wait for, a stream to read, a way to cancel. Thread-safe."""

    def __init__(self, request_id: str, cancel):
        self.request_id = request_id
        self._cancel = cancel
        self._deltas: queue.SimpleQueue[Delta | RequestOutput] = queue.SimpleQueue()
        self._done = threading.Event()
        self._output: RequestOutput | None = None
        self._callbacks: list = []
        self._lock = threading.Lock()
        self.submitted = time.perf_counter()

    def push(self, delta: Delta) -> None:
        """Engine side: hands over what a step produced."""
        self._deltas.put(delta)

    def finish(self, output: RequestOutput) -> None:
        """Engine side: the last word; later calls change nothing."""
        with self._lock:
            if self._output is not None:
                return
            self._output = output
            callbacks = list(self._callbacks)
        self._deltas.put(output)
        self._done.set()
        for callback in callbacks:
            callback(output)

    def on_done(self, callback) -> None:
        """Calls `callback(output)` when the request ends, at once if it has."""
        with self._lock:
            if self._output is None:
                self._callbacks.append(callback)
                return
        callback(self._output)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """Ends the request with finish_reason "cancelled"; tokens produced so far stay in its output."""
        self._cancel(self.request_id)

    def wait(self, timeout: float | None = None) -> RequestOutput:
        """The output, an error inside it; raises TimeoutError when `timeout` seconds pass first."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout} s")
        return self._output

    def result(self, timeout: float | None = None) -> RequestOutput:
        """The output; raises the request's error."""
        output = self.wait(timeout)
        if output.error is not None:
            raise output.error
        return output

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


def failed_output(request_id: str, error: RequestError) -> RequestOutput:
    """What a list call gives for a request that failed before it produced anything."""
    return RequestOutput(
        request_id=request_id, text="", token_ids=[], prompt_token_ids=[], finish_reason="error", error=error
    )
