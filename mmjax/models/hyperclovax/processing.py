# SPDX-License-Identifier: Apache-2.0
"""Host side of HyperCLOVAX vision: pictures and clips as in Qwen2-VL, positions on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from mmjax.inputs.items import ItemPlan
from mmjax.models.decoder.positions import plain_positions
from mmjax.models.hyperclovax.config import HyperClovaXConfig
from mmjax.models.qwen_shared.processing import QwenProcessor
from mmjax.models.qwen_shared.settings import QWEN2_CLIPS


@dataclass(frozen=True)
class HyperClovaXProcessor(QwenProcessor):
    """`Processor` of HyperCLOVAX vision. Methods are pure and may run in any thread."""

    @classmethod
    def from_checkpoint(cls, cfg: HyperClovaXConfig, path: Path | str) -> HyperClovaXProcessor:
        """Processor of the checkpoint in the directory `path`. Raises CheckpointError for unusable settings."""
        return cls(**cls._fields(cfg, Path(path), QWEN2_CLIPS))

    def positions(
        self, token_ids: Int32[np.ndarray, "S"], spans: Sequence[tuple[int, ItemPlan]]
    ) -> tuple[Int32[np.ndarray, "1 S"], int]:
        """Places in the prompt, rows included; decoding adds a delta of 0."""
        return plain_positions(len(token_ids))
