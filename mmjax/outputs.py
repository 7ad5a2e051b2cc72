# SPDX-License-Identifier: Apache-2.0
"""What callers get back: outputs, deltas of a stream, metrics, logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mmjax.errors import MMJaxError
from mmjax.inputs.usage import Usage

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output position, of the model's distribution before temperature and filters."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)

    @classmethod
    def read(cls, sampled: Any, row: int, wanted: int | None) -> TokenLogprobs | None:
        """Those of one row of a sampled batch, with the `wanted` likeliest tokens; None if nobody wants any."""
        if wanted is None:
            return None
        top = zip(sampled.top_ids[row][:wanted].tolist(), sampled.top_logprobs[row][:wanted].tolist(), strict=True)
        return cls(int(sampled.tokens[row]), float(sampled.logprobs[row]), dict(top))


@dataclass
class RequestMetrics:
    """Seconds from submission to each milestone, and what the caches saved.

    Attributes:
      queued: until the first chunk was scheduled.
      encode: until the last item had its rows.
      prefill: until the prompt's last chunk was dispatched.
      first_token: until the first token was read.
      total: until the request ended.
      items_encoded, items_cached: a clip that the encoder takes in parts counts as often.
    """

    queued: float | None = None
    encode: float | None = None
    prefill: float | None = None
    first_token: float | None = None
    total: float | None = None
    items_encoded: int = 0
    items_cached: int = 0
    prefix_tokens_reused: int = 0


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer: text that can no longer change, and the tokens behind it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `error` is set iff `finish_reason == "error"`; `warnings` tell of odd but served input."""

    request_id: str
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    usage: Usage = field(default_factory=lambda: Usage(text_tokens=0))
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    warnings: tuple[str, ...] = ()
    error: MMJaxError | None = None
