# SPDX-License-Identifier: Apache-2.0
"""What tells one family from another, read off its config and its processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from mmjax.errors import CheckpointError
from mmjax.inputs.items import ItemPlan, Modality, VideoMetadata
from mmjax.models.family import Family, ModelConfig, Processor


class Span(StrEnum):
    """How an item stands in the prompt."""

    WHOLE = "one span"
    BREAKS = "one span, breaks inside"
    STEPS = "one span, of clips one a step"


class Rotary(StrEnum):
    """What rotary positions the decoder has: with one axis, or how the pairs of a head share three of them."""

    PLAIN = "one axis"
    BLOCKS = "mRoPE, blocks"
    INTERLEAVED = "mRoPE, interleaved"


class TowerAttention(StrEnum):
    """What a patch of the tower sees: its whole picture, or in most blocks one window of it."""

    FULL = "full"
    WINDOWS = "windows and full"


@dataclass(frozen=True)
class FamilyFacts:
    """Attributes:
    modalities: what it takes.
    beyond_vocabulary: whether placeholder ids may lie beyond the embedding table.
    merge: patches that make one embedding row.
    deepstack: whether levels of rows are added between text layers.
    """

    modalities: tuple[Modality, ...]
    span: Span
    beyond_vocabulary: bool
    merge: int
    attention: TowerAttention
    deepstack: bool
    rotary: Rotary


def family_facts(family: Family, hf: Mapping[str, Any], folder: Path) -> FamilyFacts:
    """The facts of a checkpoint directory with the parsed config.json `hf`.

    Raises CheckpointError where its files can't be used.
    """
    cfg = family.config(dict(hf))
    processor = family.processor(cfg, folder)
    return FamilyFacts(
        modalities=tuple(processor.placeholder_id),
        span=_span(processor),
        beyond_vocabulary=_beyond_vocabulary(family, hf, folder, processor),
        merge=cfg.merge,
        attention=TowerAttention.WINDOWS if cfg.window_capacity else TowerAttention.FULL,
        deepstack=bool(family.deepstack_layers(cfg)),
        rotary=_rotary(cfg),
    )


def _span(processor: Processor) -> Span:
    """From a picture of several lines of rows and a clip of several steps."""
    if _runs(processor.plan_image(200, 150, {})) > 1:
        return Span.BREAKS
    if Modality.VIDEO not in processor.placeholder_id:
        return Span.WHOLE
    clip = processor.plan_video(VideoMetadata(4, 2.0, (0, 1, 2, 3)), 128, 128, {})
    return Span.STEPS if _runs(clip) > 1 else Span.WHOLE


def _runs(plan: ItemPlan) -> int:
    """Stretches of positions that take rows."""
    taken: Bool[np.ndarray, "n"] = plan.span_embed
    return int(np.count_nonzero(np.diff(taken.astype(np.int8), prepend=0) == 1))


def _beyond_vocabulary(family: Family, hf: Mapping[str, Any], folder: Path, processor: Processor) -> bool:
    """Whether the same checkpoint with an embedding table that ends before the placeholders is one of the family."""
    rows = min(processor.placeholder_id.values())
    if any(special >= rows for special in processor.special_ids):
        return False  # those keep their text embeddings
    part = {"text_config": {**hf["text_config"], "vocab_size": rows}} if "text_config" in hf else {"vocab_size": rows}
    try:
        family.config({**hf, **part})
    except CheckpointError:
        return False
    return True


def _rotary(cfg: ModelConfig) -> Rotary:
    if cfg.position_axes == 1:
        return Rotary.PLAIN
    return Rotary.INTERLEAVED if cfg.text.mrope_interleaved else Rotary.BLOCKS
