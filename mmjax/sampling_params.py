# SPDX-License-Identifier: Apache-2.0
"""How one request is sampled: the caller's knobs, validated, and their packing into per-row arrays for a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from mmjax.errors import EngineError, RequestError

MAX_LOGPROBS = 20  # alternatives per token, the limit of OpenAI's API; fixed because it is an output shape
MAX_STOP_TOKEN_IDS = 16  # per request
STOP_WIDTH = 24  # a request's stop ids and the model's end-of-sequence ids; fixed because it is an input shape
GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them overflows float32
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """The usual sampling knobs, with the usual defaults. Every bad value raises RequestError and is named.

    Order of application: repetition penalty, frequency and presence penalties, temperature, top_k, top_p, min_p (the
    order of transformers). `logprobs` are of the model's own distribution, before any of these.

    Attributes:
      max_tokens: tokens to generate at most; None goes on to the end of the context.
      min_tokens: tokens to generate before an end-of-sequence token, a stop id or a stop string may end the answer.
      temperature: divides the logits; 0 (or anything under 1e-5) takes the most probable token.
      top_k: sample from the k most probable tokens (ties included); 0 or -1 is off.
      top_p: sample from the smallest set of tokens whose probability reaches top_p; 1 is off.
      min_p: drop tokens less probable than min_p times the most probable one; 0 is off.
      repetition_penalty: over 1 makes tokens of the prompt and the answer less likely (divides a positive logit,
        multiplies a negative one); 1 is off.
      presence_penalty: subtracted from the logit of every token that the answer already holds.
      frequency_penalty: subtracted once per occurrence in the answer.
      seed: a request with a seed draws the same tokens from the same logits, whatever shares its batch.
      logprobs: None, or how many alternatives to report with each token's log-probability; 0 reports the token's own.
      stop: text that ends the answer; it is cut off.
      stop_token_ids: ids that end the answer; they stay in `token_ids`, their text is left out.
      ignore_eos: go on after the model's end-of-sequence tokens.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _INT32_MAX, "None means to the end of the context")
        _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        _number("temperature", self.temperature, 0, math.inf, "0 takes the most probable token")
        _integer("top_k", self.top_k, -1, _INT32_MAX, "0 or -1 turns it off")
        _number("top_p", self.top_p, 0, 1, "1 turns it off; for the most probable token use temperature=0")
        if self.top_p == 0:
            raise RequestError("top_p=0 keeps no token; for the most probable token use temperature=0")
        _number("min_p", self.min_p, 0, 1, "0 turns it off")
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf, "1 turns it off")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty=0 divides by zero; 1 turns it off")
        _number("presence_penalty", self.presence_penalty, -2, 2, "0 turns it off")
        _number("frequency_penalty", self.frequency_penalty, -2, 2, "0 turns it off")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1, "None draws one")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, "None turns it off")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        object.__setattr__(self, "top_k", max(0, self.top_k))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one (after penalties)."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether the sampler must know this request's tokens (`SamplerState` in layers/sampling.py)."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class SamplingRow(NamedTuple):
    """One sequence of a step."""

    params: SamplingParams
    seed: int  # the request's own, or one the engine drew for it
    step: int  # tokens it has generated so far; after a preemption the draws go on where they stopped
    eos_token_ids: tuple[int, ...]


def is_plain_greedy(rows: Sequence[SamplingRow | None]) -> bool:
    """Whether all rows (None is padding) can take the sampler that is nothing but an argmax."""
    return all(
        row is None
        or (
            row.params.greedy
            and not row.params.penalised
            and row.params.logprobs is None
            and row.step >= row.params.min_tokens
        )
        for row in rows
    )


def seed_words(seed: int) -> tuple[int, int]:
    """The two uint32 words of a threefry key, high word first: those of `jax.random.key(seed)` for a 64-bit seed."""
    seed %= 2**64
    return seed >> 32, seed & 0xFFFFFFFF


def sampling_arrays(rows: Sequence[SamplingRow | None], batch_size: int, vocab_size: int) -> dict[str, np.ndarray]:
    """The fields of `layers.sampling.SamplingInputs`, freshly made, padded to `batch_size` with greedy rows.

    Args:
      rows: at most `batch_size` sequences; None for a padding row.

    Raises:
      EngineError: more rows than `batch_size`, or more stop ids in a row than STOP_WIDTH.
    """
    if len(rows) > batch_size:
        raise EngineError(f"{len(rows)} rows for a sampler of {batch_size}")
    padding = SamplingRow(_PADDING, 0, 0, ())
    full = [padding if row is None else row for row in rows] + [padding] * (batch_size - len(rows))
    numbers = np.array([_NUMBERS(row.params) for row in full], np.float32)
    return {
        **{name: numbers[:, column].copy() for column, name in enumerate(_NUMBER_FIELDS)},
        "top_k": np.array([min(row.params.top_k, vocab_size) for row in full], np.int32),
        "key": np.array([seed_words(row.seed) for row in full], np.uint32),
        "step": np.array([row.step for row in full], np.int32),
        "min_tokens": np.array([row.params.min_tokens for row in full], np.int32),
        "stop_ids": _stop_ids_table(full, vocab_size),
        "want_logprobs": np.array([row.params.logprobs is not None for row in full], bool),
    }


def banned_mask(ids: Iterable[int], vocab_size: int) -> Bool[np.ndarray, "V"]:
    """Which tokens of the vocabulary are never drawn; `ids` may lie outside, as placeholders of some models do."""
    return np.isin(np.arange(vocab_size), list(ids))


def _stop_ids_table(rows: Sequence[SamplingRow], vocab_size: int) -> np.ndarray:
    """[B, STOP_WIDTH]: ids that may not be drawn before `min_tokens`, padded with an id that the sampler drops."""
    table = np.full((len(rows), STOP_WIDTH), vocab_size, np.int32)
    for line, row in zip(table, rows, strict=True):
        ids = row.params.stop_token_ids + (() if row.params.ignore_eos else row.eos_token_ids)
        if len(ids) > STOP_WIDTH:
            raise EngineError(f"{len(ids)} stop and end-of-sequence ids; the sampler holds {STOP_WIDTH}")
        line[: len(ids)] = ids
    return table


def _integer(name: str, value: Any, low: int, high: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name}={value!r} must be an integer{_hint(hint)}")
    if not low <= value <= high:
        raise RequestError(f"{name}={value} is outside {low}..{high}{_hint(hint)}")


def _number(name: str, value: Any, low: float, high: float, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name}={value!r} must be a number{_hint(hint)}")
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f"finite and at least {low}" if high == math.inf else f"within {low}..{high}"
        raise RequestError(f"{name}={value} must be {bounds}{_hint(hint)}")


def _hint(text: str) -> str:
    return f" ({text})" if text else ""


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in strings:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop={text!r} must be a string of at least one character, or a list of them")
    return strings


def _stop_ids(ids: Any) -> tuple[int, ...]:
    ids = tuple(ids or ())
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"stop_token_ids holds {len(ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed")
    for token in ids:
        _integer("stop_token_ids", token, 0, _INT32_MAX)
    return tuple(int(token) for token in ids)


_PADDING = SamplingParams(temperature=0.0)
_NUMBER_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = attrgetter(*_NUMBER_FIELDS)
