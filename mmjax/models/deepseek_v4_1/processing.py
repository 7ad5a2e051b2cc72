# SPDX-License-Identifier: Apache-2.0
"""Host side of DeepSeek-V4.1: sizes, patches and placeholders of still pictures, by rules the config fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from mmjax.errors import CheckpointError, RequestError
from mmjax.inputs.items import EncoderBucket, ItemPlan, Modality, ProcessedItem, VideoMetadata
from mmjax.models.added_tokens import added_token_ids
from mmjax.models.decoder.positions import plain_positions
from mmjax.models.deepseek_v4_1.config import DeepseekV41Config
from mmjax.models.deepseek_v4_1.grid import Grid, GridRule, most_rows, plan_grid, worst_grid
from mmjax.models.deepseek_v4_1.inputs import DeepseekVisionInputs
from mmjax.models.deepseek_v4_1.packing import pack_pictures
from mmjax.models.deepseek_v4_1.pixels import byte_table, patches
from mmjax.models.images.normalisation import CHANNELS
from mmjax.models.images.patches import check_pixels

PLACEHOLDER = "<｜deepseek_image｜>"


@dataclass(frozen=True)
class DeepseekProcessor:
    """`Processor` of DeepSeek-V4.1; takes no pictures without a tower. Methods are pure and may run in any thread."""

    rule: GridRule
    placeholder_id: Mapping[Modality, int]
    never_sampled: tuple[int, ...]
    placeholder_text: Mapping[Modality, str]
    special_ids: tuple[int, ...] = ()

    @classmethod
    def from_checkpoint(cls, cfg: DeepseekV41Config, path: Path | str) -> DeepseekProcessor:
        """Processor of the checkpoint in the directory `path`.

        Raises CheckpointError if its tokenizer gives the placeholder another id than config.json.
        """
        check_placeholder(Path(path), cfg.image_token_id)
        takes = (Modality.IMAGE,) if cfg.vision.depth else ()
        return cls(
            rule=cfg.vision.grid_rule,
            placeholder_id=dict.fromkeys(takes, cfg.image_token_id),
            never_sampled=(cfg.image_token_id,),
            placeholder_text=dict.fromkeys(takes, PLACEHOLDER),
        )

    def resolve(self, modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
        """Always empty: the config fixes everything. Raises RequestError for any option and for other media."""
        if modality not in self.placeholder_id:
            raise RequestError(f"this model takes {'images' if self.placeholder_id else 'text only'}, not {modality}")
        if options:
            raise RequestError(f"this model takes no processor options, got {', '.join(sorted(options))}")
        return {}

    def plan_image(self, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan:
        """Plan of a picture of `height` x `width` pixels."""
        options = self.resolve(Modality.IMAGE, options)
        grid = plan_grid(height, width, self.rule)
        return ItemPlan(
            modality=Modality.IMAGE,
            grid=(1, grid.height, grid.width),
            rows=grid.span,
            contexts=(grid.patches,),
            windows=0,
            span_ids=np.full(grid.span, self.placeholder_id[Modality.IMAGE], np.int32),
            span_embed=np.ones(grid.span, bool),
            options=options,
        )

    def sample_frames(self, metadata: VideoMetadata, options: Mapping[str, Any]) -> tuple[int, ...]:
        raise RequestError("this model takes images, not video")

    def plan_video(self, metadata: VideoMetadata, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan:
        raise RequestError("this model takes images, not video")

    def image(self, rgb: UInt8[np.ndarray, "height width 3"], options: Mapping[str, Any]) -> ProcessedItem:
        """A picture as patches."""
        check_pixels("a picture", rgb, ("height", "width"))
        plan = self.plan_image(*rgb.shape[:2], options)
        return ProcessedItem(plan, patches(rgb, Grid(*plan.grid[1:], self.rule.cell), self.rule))

    def video(
        self, frames: UInt8[np.ndarray, "frames height width 3"], metadata: VideoMetadata, options: Mapping[str, Any]
    ) -> ProcessedItem:
        raise RequestError("this model takes images, not video")

    def positions(
        self, token_ids: Int32[np.ndarray, "S"], spans: Sequence[tuple[int, ItemPlan]]
    ) -> tuple[Int32[np.ndarray, "1 S"], int]:
        """One position a token, pictures or not."""
        return plain_positions(len(token_ids))

    def max_tokens_per_item(self) -> dict[Modality, int]:
        """Patches of the largest picture."""
        return {Modality.IMAGE: worst_grid(self.rule).patches}

    def max_rows(self, tokens: int) -> int:
        """Embedding rows, learned ones included, that pictures of `tokens` patches in all may take at most."""
        return most_rows(tokens, self.rule)

    def worst_contexts(self, tokens: int) -> int:
        """A picture is one context."""
        return 1

    def worst_windows(self, total_tokens: int) -> int:
        """None: every patch sees its whole picture."""
        return 0

    def pixel_table(self) -> Float32[np.ndarray, "3 256"]:
        """What the tower sees of each byte."""
        return byte_table()

    def pack(self, items: Sequence[ProcessedItem], bucket: EncoderBucket) -> DeepseekVisionInputs:
        """Freshly made inputs of one encoder call, padded to `bucket`, see `pack_pictures`."""
        return pack_pictures(items, bucket, patch_values=CHANNELS * self.rule.patch**2, cell=self.rule.cell)


def check_placeholder(path: Path, image_token_id: int) -> None:
    """Raises CheckpointError if the tokenizer in `path` knows the placeholder under another id."""
    known = added_token_ids(path).get(PLACEHOLDER, image_token_id)
    if known != image_token_id:
        raise CheckpointError(
            f"{path}: the tokenizer's id of {PLACEHOLDER!r} is {known}, "
            f"config.json says image_token_id {image_token_id}"
        )
