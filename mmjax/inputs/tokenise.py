# SPDX-License-Identifier: Apache-2.0
"""Tokenising text of mixed origin: special tokens are read in template text and never in what a user wrote."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from mmjax.errors import CheckpointError, RequestError


class Segment(NamedTuple):
    """A stretch of a prompt and who wrote it."""

    text: str
    from_user: bool


class _Special(NamedTuple):
    start: int
    end: int
    id: int


class GuardedTokenizer:
    """A checkpoint's tokenizer with a set of guarded tokens that user text can't produce.

    Guarded are all tokens that the tokenizer calls special, and `guarded_ids`: placeholders and whatever else only
    items may bring into a context. Other added tokens (`<think>`) are ordinary text here, as in the tokenizer itself.

    Args:
      tokenizer: a transformers tokenizer backed by the `tokenizers` library.
      guarded_ids: more ids to guard; ids that the tokenizer does not have are ignored.

    Raises:
      CheckpointError: the tokenizer has no fast form.
    """

    def __init__(self, tokenizer: Any, guarded_ids: Iterable[int] = ()):
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise CheckpointError("the checkpoint's tokenizer has no fast form; a tokenizer.json is needed")
        extra = set(guarded_ids)
        added = tokenizer.added_tokens_decoder
        self._added = {token_id: token for token_id, token in added.items() if token.special or token_id in extra}
        self.guarded = {token.content: token_id for token_id, token in self._added.items()}
        self.reserved = [self._added[token_id].content for token_id in extra & self._added.keys()]
        # Longest first: alternation takes the first match, the tokenizer the longest.
        texts = sorted((text for text in self.guarded if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._bos = tokenizer.bos_token
        self._adds_specials = bool(tokenizer.num_special_tokens_to_add())

    def holds_guarded(self, text: str) -> bool:
        """Whether `text` spells a guarded token."""
        return self._pattern.search(text) is not None

    def guarded_sequence(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of the guarded tokens that template text spells, in order."""
        return [special.id for special in self._specials(segments)]

    def encode(self, text: str) -> list[int]:
        """Ids of a text whose writer owns the whole prompt: special tokens are parsed, none is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Like `encode`, with the tokens that the tokenizer puts around a text unless the text starts with them."""
        if not self._adds_specials or (self._bos and text.startswith(self._bos)):
            return self.encode(text)
        return self._backend.encode(text, add_special_tokens=True).ids

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of a prompt in which only template text may spell guarded tokens.

        Text between two guarded tokens is tokenised as a whole, whoever wrote it. Where no user text spells one, the
        result is the tokenizer's own.

        Raises:
          RequestError: the tokenizer has no other way to write what a user typed than the guarded token itself.
        """
        text = "".join(segment.text for segment in segments)
        specials = self._specials(segments)
        ids = self.encode(text)
        if [token for token in ids if token in self._added] == [special.id for special in specials]:
            return ids
        bounds = [_Special(0, 0, -1), *specials, _Special(len(text), len(text), -1)]
        ids = []
        for before, after in pairwise(bounds):
            ids += self._encode_plain(self._between(text, before, after))
            ids += [after.id] if after.id >= 0 else []
        return ids

    def _specials(self, segments: Sequence[Segment]) -> list[_Special]:
        """Guarded tokens that lie wholly in template text."""
        text = "".join(segment.text for segment in segments)
        of_user, position = bytearray(len(text)), 0
        for segment in segments:
            end = position + len(segment.text)
            if segment.from_user:
                of_user[position:end] = b"\x01" * len(segment.text)
            position = end
        found, start = [], 0
        while match := self._pattern.search(text, start):
            forged = of_user.find(1, match.start(), match.end()) >= 0
            # A forged match hides no real one that starts inside it: the search goes on one character later.
            start = match.start() + 1 if forged else match.end()
            if not forged:
                found.append(_Special(match.start(), match.end(), self.guarded[match.group()]))
        return found

    def _between(self, text: str, before: _Special, after: _Special) -> str:
        """Text between two specials, less the white space that they swallow."""
        piece = text[before.end : after.start]
        if before.id >= 0 and self._added[before.id].rstrip:
            piece = piece.lstrip()
        if after.id >= 0 and self._added[after.id].lstrip:
            piece = piece.rstrip()
        return piece

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        for token in ids:
            if token in self._added:
                raise RequestError(
                    f"a message spells {self._added[token].content!r}, which this tokenizer can't write as plain text"
                )
        return ids

    @cached_property
    def _plain(self) -> Tokenizer:
        """A copy that knows no guarded token. Made only when somebody types one."""
        plain = copy.deepcopy(self._backend)
        plain.add_special_tokens([AddedToken(text, normalized=False) for text in self.guarded])
        plain.no_padding()
        plain.no_truncation()
        plain.encode_special_tokens = True
        return plain
