# SPDX-License-Identifier: Apache-2.0
"""Exact token counts of a request, split by where the tokens come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Tokens of one request. The prompt's parts add up to `prompt_tokens`, which counts the expanded prompt.

    An item counts with all its positions, special tokens included; text inside its span (time stamps) is text.
    """

    text_tokens: int
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    completion_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the expanded prompt."""
        return self.text_tokens + self.image_tokens + self.video_tokens + self.audio_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens
