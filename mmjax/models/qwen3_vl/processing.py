# SPDX-License-Identifier: Apache-2.0
"""Host side of Qwen3-VL. Pictures are as in Qwen2-VL; clips have times in the prompt and limits for the whole clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from mmjax.inputs.items import EncoderBucket, ItemPlan, Modality, ProcessedItem, VideoMetadata
from mmjax.models.images.normalisation import CHANNELS
from mmjax.models.qwen3_vl.config import Qwen3VLConfig
from mmjax.models.qwen3_vl.frames import spread_frames, step_seconds
from mmjax.models.qwen3_vl.options import NESTED, take_nested
from mmjax.models.qwen3_vl.packing import pack_with_taps
from mmjax.models.qwen3_vl.positions import step_positions
from mmjax.models.qwen3_vl.sizes import clip_resize, most_clip_blocks
from mmjax.models.qwen3_vl.spans import ClipText
from mmjax.models.qwen3_vl.vision_inputs import Qwen3VLVisionInputs
from mmjax.models.qwen_shared.processing import QwenProcessor

# What transformers' Qwen3VLVideoProcessor assumes.
CLIPS: Mapping[str, Any] = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_sample_frames": True,
    "fps": 2,
    "max_video_tokens": 768,
}


@dataclass(frozen=True, kw_only=True)
class Qwen3VLProcessor(QwenProcessor):
    """`Processor` of Qwen3-VL. Methods are pure and may run in any thread.

    `min_pixels` and `max_pixels` of clips count the pixels of all frames.

    Attributes:
      table_side: entries along one side of the tower's table of learned positions.
      clip_text: writes clips in the checkpoint's tokens.
    """

    table_side: int
    clip_text: ClipText

    @classmethod
    def from_checkpoint(cls, cfg: Qwen3VLConfig, path: Path | str) -> Qwen3VLProcessor:
        """Processor of the checkpoint in the directory `path`. Raises CheckpointError for unusable settings."""
        return cls(
            **cls._fields(cfg, Path(path), CLIPS),
            table_side=cfg.vision.table_side,
            clip_text=ClipText(Path(path), cfg.vision_start_token_id, cfg.vision_end_token_id),
        )

    def resolve(self, modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
        """Every option with its value. Raises RequestError for unknown names and unusable values."""
        nested, shared = take_nested(options)
        resolved = super().resolve(modality, shared)
        return resolved | {NESTED: nested} if modality is Modality.VIDEO else resolved

    def plan_video(self, metadata: VideoMetadata, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan:
        """Plan of a clip with frames of `height` x `width` pixels; a lone last frame fills its temporal step."""
        plan = super().plan_video(metadata, height, width, options)
        frames = self.sample_frames(metadata, plan.options)
        seconds = step_seconds(frames, metadata.rate, self.geometry.temporal)
        pad = self.placeholder_id[Modality.VIDEO]
        ids, embed = self.clip_text.span(seconds, plan.rows // plan.grid[0], pad)
        pair = (self.clip_text.start_id, self.clip_text.end_id)
        sampled_fps = len(frames) / metadata.total_num_frames * metadata.rate
        return replace(
            plan,
            span_ids=ids,
            span_embed=embed,
            seconds_per_step=self.geometry.temporal / sampled_fps,
            absorbs=None if plan.options[NESTED] else pair,
        )

    def positions(
        self, token_ids: Int32[np.ndarray, "S"], spans: Sequence[tuple[int, ItemPlan]]
    ) -> tuple[Int32[np.ndarray, "3 S"], int]:
        """Rotary positions of the whole prompt and the delta of decoding, see `step_positions`."""
        return step_positions(len(token_ids), spans, self.geometry.merge)

    def max_tokens_per_item(self) -> dict[Modality, int]:
        """Patches of the largest picture and of the largest clip under the checkpoint's limits.

        Clips of very thin frames may be larger; they run in parts, see `inputs.parts`.
        """
        clip = self.video_settings
        blocks = most_clip_blocks(
            factor=self.geometry.factor,
            temporal=self.geometry.temporal,
            max_pixels=clip.max_pixels,
            max_frames=clip.max_frames,
        )
        image = super().max_tokens_per_item()[Modality.IMAGE]
        return {Modality.IMAGE: image, Modality.VIDEO: blocks * self.geometry.merge**2}

    def pack(self, items: Sequence[ProcessedItem], bucket: EncoderBucket) -> Qwen3VLVisionInputs:
        """Freshly made inputs of one encoder call, padded to `bucket`, see `pack_with_taps`."""
        patch, temporal = self.geometry.patch, self.geometry.temporal
        return pack_with_taps(
            items,
            bucket,
            patch_values=CHANNELS * temporal * patch * patch,
            merge=self.geometry.merge,
            table_side=self.table_side,
        )

    def _choose_frames(self, total: int, rate: float, options: Mapping[str, Any]) -> Int64[np.ndarray, "frames"]:
        return spread_frames(total, rate, options)

    def _clip_size(self, frames: int, height: int, width: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """With `cap_pixels_per_frame` a frame has at most `max_video_tokens` merge blocks and its share of the clip."""
        least, most = options["min_pixels"], options["max_pixels"]
        if options["cap_pixels_per_frame"]:
            largest = self.video_settings.max_video_tokens * self.geometry.factor**2
            most = max(min(largest, most // frames), int(least * 1.05)) * frames
        return clip_resize(
            frames,
            height,
            width,
            factor=self.geometry.factor,
            temporal=self.geometry.temporal,
            min_pixels=least,
            max_pixels=most,
        )
