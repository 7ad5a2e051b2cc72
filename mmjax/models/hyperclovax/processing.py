# SPDX-License-Identifier: Apache-2.0
"""Host side of HyperCLOVAX vision: pictures and clips as in Qwen2-VL, positions on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32

from mmjax.errors import RequestError
from mmjax.inputs.clip_durations import DurationMark
from mmjax.inputs.items import ItemPlan, Modality
from mmjax.models.added_tokens import added_token_ids
from mmjax.models.decoder.positions import plain_positions
from mmjax.models.hyperclovax.config import HyperClovaXConfig
from mmjax.models.qwen_shared.processing import QwenProcessor
from mmjax.models.qwen_shared.settings import QWEN2_CLIPS


@dataclass(frozen=True)
class HyperClovaXProcessor(QwenProcessor):
    """`Processor` of HyperCLOVAX vision. Methods are pure and may run in any thread."""

    duration_mark: ClassVar[DurationMark] = DurationMark("<|video_duration|>", "video_duration")

    @classmethod
    def from_checkpoint(cls, cfg: HyperClovaXConfig, path: Path | str) -> HyperClovaXProcessor:
        """Processor of the checkpoint in the directory `path`. Raises CheckpointError for unusable settings.

        Ids are the config's and spellings the tokenizer's.
        """
        fields = cls._fields(cfg, Path(path), QWEN2_CLIPS)
        spelling = {token: text for text, token in added_token_ids(Path(path)).items()}
        usual, ids = fields["placeholder_text"], fields["placeholder_id"]
        texts = {modality: spelling.get(ids[modality], usual[modality]) for modality in ids}
        return cls(**fields | {"placeholder_text": texts})

    def resolve(self, modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
        """Every option with its value. Raises RequestError for unknown names and unusable values.

        The seconds that a caller gives a clip are words for the prompt; they change no pixel.
        """
        seconds = options.get(self.duration_mark.key, 0.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise RequestError(f"{self.duration_mark.key} must be a number of seconds, got {seconds!r}")
        return super().resolve(modality, {key: options[key] for key in options if key != self.duration_mark.key})

    def positions(
        self, token_ids: Int32[np.ndarray, "S"], spans: Sequence[tuple[int, ItemPlan]]
    ) -> tuple[Int32[np.ndarray, "1 S"], int]:
        """Places in the prompt, rows included; decoding adds a delta of 0."""
        return plain_positions(len(token_ids))
