# SPDX-License-Identifier: Apache-2.0
"""Items: one image, one video clip or one audio clip, planned (sizes only) or processed (with patches)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np


class Modality(StrEnum):
    """What an item is. Values are the keys of `multi_modal_data`."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


ASSUMED_FPS = 24.0  # of a clip whose rate nobody knows, as in transformers


@dataclass(frozen=True)
class VideoMetadata:
    """Where a clip's frames come from. `frames_indices` index the source; `fps` is the source's, None if unknown."""

    total_num_frames: int
    fps: float | None
    frames_indices: tuple[int, ...]
    duration: float | None = None

    @property
    def rate(self) -> float:
        """Frames a second of the source: `fps`, or what is assumed where nobody knows."""
        return ASSUMED_FPS if self.fps is None else self.fps


@dataclass(frozen=True)
class ItemPlan:
    """Everything about an item that follows from its size alone.

    Attributes:
      grid: patches along (time, height, width).
      rows: embedding rows the encoder returns.
      contexts: lengths of its attention segments in patches; their sum is the item's encoder tokens.
      windows: rows of the window table it needs, 0 for families without windows.
      span_ids: int32 [n], the token ids that replace the item's one placeholder in the prompt.
      span_embed: bool [n], which of them take an embedding row.
      absorbs: ids right before and right behind the placeholder that the span stands for as well, where the prompt
        has both.
      seconds_per_step: seconds one temporal step of a clip covers; None for stills.
      options: resolved processor options; part of the item's cache key.
      warnings: remarks for the caller, such as a strong reduction in size.
    """

    modality: Modality
    grid: tuple[int, int, int]
    rows: int
    contexts: tuple[int, ...]
    windows: int
    span_ids: np.ndarray
    span_embed: np.ndarray
    seconds_per_step: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    absorbs: tuple[int, int] | None = None

    @property
    def encoder_tokens(self) -> int:
        """Attention tokens before merging: the unit of budget B."""
        return sum(self.contexts)


@dataclass(frozen=True)
class ProcessedItem:
    """A plan with its pixels: `patches` is uint8 [P, values], patch-major, freshly made and never written again."""

    plan: ItemPlan
    patches: np.ndarray


class EncoderGraphKey(NamedTuple):
    """Names one compiled encoder bucket."""

    total_tokens: int
    num_contexts: int


class EncoderBucket(NamedTuple):
    """The static sizes of one compiled encoder executable."""

    key: EncoderGraphKey
    window_rows: int  # windows it holds, 0 without windows
    rows: int  # embedding rows it returns
