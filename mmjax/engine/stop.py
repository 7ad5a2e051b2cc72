# SPDX-License-Identifier: Apache-2.0
"""When an answer ends, and which of its text may be shown so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from mmjax.engine.detokenizer import Detokenizer
from mmjax.sampling_params import SamplingParams


class StopResult(NamedTuple):
    """What one token brings."""

    text: str  # to emit now
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None  # the token id or the stop string that ended the answer


class StopChecker:
    """Follows one answer: end-of-sequence and stop ids, stop strings, and the number of tokens.

    A stop id ends the answer without its text. A stop string is found across token boundaries: text that may begin one
    is held back until it is decided. Of several, the one that is complete first counts (of those, the longest), so the
    answer does not depend on how its text falls into tokens.

    Args:
      params: `stop`, `stop_token_ids`, `ignore_eos`, `min_tokens` and `max_tokens` are read.
      detokenizer: a fresh one, of this request.
      eos_token_ids: the model's end-of-sequence ids.
      room: tokens that the context leaves to generate.

    Attributes:
      max_tokens: the answer's limit, the smaller of `room` and `params.max_tokens`.
      eos_token_ids: as given.
    """

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer, eos_token_ids: Iterable[int], room: int):
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._detokenizer = detokenizer
        self._ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        self._strings = params.stop
        self._min_tokens = params.min_tokens
        self._count = 0
        self._held = ""

    def add(self, token_id: int) -> StopResult:
        """Take the next token of the answer. After a `finish_reason`, there is none."""
        self._count += 1
        if token_id in self._ids and self._count > self._min_tokens:
            return self._finish("", "stop", token_id)
        text, found = self._feed(self._detokenizer.add([token_id]))
        if found is not None:
            return StopResult(text, "stop", found)
        if self._count >= self.max_tokens:
            return self._finish(text, "length", None)
        return StopResult(text)

    def flush(self) -> str:
        """Text held back so far, for an answer that is cut short, such as a cancelled one. No token may follow."""
        return self._finish("", "stop", None).text

    def _finish(self, text: str, reason: Literal["stop", "length"], stop_reason: int | None) -> StopResult:
        rest, found = self._feed(self._detokenizer.finish())
        if found is not None:
            return StopResult(text + rest, "stop", found)
        held, self._held = self._held, ""
        return StopResult(text + rest + held, reason, stop_reason)

    def _feed(self, new: str) -> tuple[str, str | None]:
        """Text to emit, and the stop string it ends before, if one was completed by `new`."""
        decided = len(self._held)  # no stop string ends within this
        text = self._held + new
        if self._strings and self._count >= self._min_tokens:
            found = self._first_stop(text, decided)
            if found is not None:
                start, stop = found
                self._held = ""
                return text[:start], stop
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _first_stop(self, text: str, decided: int) -> tuple[int, str] | None:
        found = []
        for stop in self._strings:
            start = text.find(stop, max(0, decided - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._strings):
                return length
        return 0
