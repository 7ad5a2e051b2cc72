# SPDX-License-Identifier: Apache-2.0
"""Tokens to text as they come, for one request: no broken characters, and no more work per token late than early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_BROKEN = "\ufffd"  # what decoders write for bytes that are not (yet) UTF-8
_CONTEXT = 4  # tokens kept before the next one; a character spans at most four
_WINDOW = 16  # tokens at which the window is cut back to the context
_MAX_HELD = 8  # tokens without a whole character; more than a character can span means that the bytes are broken


class TokenDecoder(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...


class Detokenizer:
    """Hands out the text of a growing answer piece by piece.

    The joined pieces equal decoding all tokens at once. What a token contributes can depend on those before it (a
    leading space is stripped from the first one, a character's bytes spread over several), so the last few tokens, the
    window, are decoded together and the part already handed out is cut off. Text that ends in a replacement character
    may be half a character and is held back.

    Special tokens (end of turn, placeholders) have no text.
    """

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._shown = ""  # the window's text as far as it was handed out
        self._settled = 0  # leading tokens of the window with nothing held back

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; empty while a character is unfinished."""
        before = len(self._window)
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            # Byte-fallback decoders give up a whole run of bytes when one is wrong, also those shown as good before.
            self._restart(self._settled)
            text = self._decode(self._window)
        new = text[len(self._shown) :]
        whole = new.rstrip(_BROKEN)
        if not whole and before >= _WINDOW and not self._decode(self._window[before:] * 2):
            # Special tokens without end: no text, no context for others. Twice, as a lone space would be stripped.
            del self._window[before:]
            return ""
        if len(whole) < len(new) and len(self._window) - self._settled > _MAX_HELD:
            return self._give_up_on(text, whole)
        self._shown += whole
        if len(whole) == len(new):
            self._settled = len(self._window)
            self._cut_back()
        return whole

    def finish(self) -> str:
        """What was held back: replacement characters for bytes that no token completed. Call it once, at the end."""
        rest = self._decode(self._window)[len(self._shown) :]
        self._restart(len(self._window))
        return rest

    def _give_up_on(self, text: str, whole: str) -> str:
        """Hand out the oldest held tokens as they are, up to a point where the window splits between characters.

        At least three tokens stay, since they may be the start of a good character. Splitting inside a character shows:
        each half then brings replacement characters of its own.
        """
        last = len(self._window) - _CONTEXT + 1
        for cut in range(last, max(self._settled, last - _MAX_HELD), -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if tail and head + tail == text:
                given, ahead = head[len(self._shown) :], self._shown[len(head) :]
                self._restart(cut)
                self._shown = ahead
                return given
        self._shown += whole
        return whole

    def _cut_back(self) -> None:
        if len(self._window) >= _WINDOW:
            shown = self._decode(self._window[-_CONTEXT:])
            if shown:  # without text it would not keep the next token from being the first
                self._restart(len(self._window) - _CONTEXT)
                self._shown, self._settled = shown, _CONTEXT

    def _restart(self, start: int) -> None:
        self._window = self._window[start:]
        self._shown, self._settled = "", 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
