# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the engine: what it wants, how far it is, what it has produced."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto

import numpy as np

from mmjax.engine.handle import Handle
from mmjax.engine.stop import StopChecker
from mmjax.errors import MMJaxError
from mmjax.inputs.prompt import PreparedPrompt
from mmjax.inputs.usage import Usage
from mmjax.outputs import Delta, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from mmjax.sampling_params import SamplingParams, SamplingRow


class Status(StrEnum):
    """Where a request stands. PREEMPTED requests wait like new ones, but keep their output."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    """For the engine thread alone; callers hold the `Handle`.

    Attributes:
      max_tokens: output tokens at most: what the caller asked for, within what the context leaves.
      key_tokens, block_keys: identity of the KV of the prompt's positions and of its full pages; empty if not shared.
      arrival: place in line; it survives preemption.
      computed: positions whose KV is written or in flight.
      prefill_end: where this run's prefill ends: prompt plus what was produced before a preemption.
      in_flight: tokens sampled on the device and not read yet.
      table: KV pages in order.
      slot: row of the device's per-sequence state, None unless running.
      registered: pages of the table that the prefix cache knows.
      rows: float32 [R, row_width] of each item, for requests that want rows.
      begun: whether the device knows of it (its slot was readied for penalties).
      lacking: items that must be decoded again before the request can run.
      restoring: whether media threads are at it.
      token_at: when its newest token was read, in seconds of `time.perf_counter`.
      embed_only: wants the rows of its items, no tokens.
    """

    id: str
    prompt: PreparedPrompt
    params: SamplingParams
    handle: Handle
    checker: StopChecker
    max_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    key_tokens: list[Hashable] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    embed_only: bool = False
    arrival: int = 0
    status: Status = Status.WAITING
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    computed: int = 0
    prefill_end: int = 0
    in_flight: int = 0
    output_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    cached_tokens: int = 0
    preemptions: int = 0
    registered: int = 0
    rows: list[np.ndarray] = field(default_factory=list)
    begun: bool = False
    lacking: list[int] = field(default_factory=list)
    restoring: bool = False
    token_at: float | None = None

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
        return self.scheduled_outputs < self.max_tokens

    @property
    def sampling_row(self) -> SamplingRow:
        """What the sampler needs; draws depend on the seed and the number of tokens produced, on nothing else."""
        return SamplingRow(self.params, self.seed, self.scheduled_outputs, self.eos_token_ids)

    def token_ids(self, begin: int, end: int) -> np.ndarray:
        """Ids of positions [begin, end) of prompt and output, int32."""
        prompt = self.prompt.token_ids
        if end <= len(prompt):
            return prompt[begin:end]
        return np.concatenate([prompt, np.asarray(self.output_ids, np.int32)])[begin:end]

    def positions(self, begin: int, end: int) -> np.ndarray:
        """Rotary positions [A, end - begin] int32; behind the prompt every axis reads index plus delta."""
        known = self.prompt.positions[:, begin : min(end, self.prompt_len)]
        tail = np.arange(max(begin, self.prompt_len), end, dtype=np.int32) + np.int32(self.prompt.position_delta)
        return np.concatenate([known, np.broadcast_to(tail, (known.shape[0], len(tail)))], axis=1)

    # ---- what happens to it ---------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds since the caller submitted it."""
        return time.perf_counter() - self.handle.submitted

    def note_started(self, cached: int) -> None:
        """The scheduler gave it a slot; `cached` prompt tokens came from the prefix cache."""
        if self.metrics.queued is None:
            self.metrics.queued = self.elapsed()
            self.cached_tokens = self.metrics.prefix_tokens_reused = cached

    def accept(self, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Takes the next token of the answer, hands its text to the stream, and says whether the answer ends."""
        if self.metrics.first_token is None:
            self.metrics.first_token = self.elapsed()
        self.output_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        result = self.checker.add(token_id)
        self.text.append(result.text)
        self.handle.push(Delta(result.text, [token_id], result.finish_reason))
        return result.finish_reason

    def flush(self) -> None:
        """Hands out the text that was held back, of an answer that is cut short."""
        text = self.checker.flush()
        if text:
            self.text.append(text)
            self.handle.push(Delta(text, [], "cancelled"))

    def output(self, reason: FinishReason, error: MMJaxError | None = None) -> RequestOutput:
        """What the caller gets when the request ends now."""
        self.metrics.total = self.elapsed()
        return RequestOutput(
            request_id=self.id,
            text="".join(self.text),
            token_ids=list(self.output_ids),
            prompt_token_ids=self.prompt.token_ids.tolist(),
            finish_reason=reason,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            usage=self.usage(),
            metrics=self.metrics,
            warnings=tuple(self.prompt.warnings),
            error=error,
        )

    def usage(self) -> Usage:
        """Prompt tokens by kind, tokens served from the prefix cache, and tokens produced."""
        return replace(self.prompt.usage, cached_tokens=self.cached_tokens, completion_tokens=len(self.output_ids))
