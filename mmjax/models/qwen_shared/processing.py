# SPDX-License-Identifier: Apache-2.0
"""Host side of Qwen2-VL and Qwen2.5-VL: sizes, patches, placeholders and positions, as transformers' processors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt8

from mmjax.errors import CheckpointError, RequestError
from mmjax.inputs.items import EncoderBucket, ItemPlan, Modality, ProcessedItem, VideoMetadata
from mmjax.models.images.normalisation import CHANNELS, byte_table
from mmjax.models.images.packing import pack_items
from mmjax.models.images.patches import check_pixels, merge_blocks
from mmjax.models.images.resize import Filter, resize
from mmjax.models.images.shrink import shrink_warnings
from mmjax.models.qwen_shared.config import QwenConfig
from mmjax.models.qwen_shared.frames import sample_frames
from mmjax.models.qwen_shared.options import resolve_image, resolve_video
from mmjax.models.qwen_shared.positions import mrope_positions
from mmjax.models.qwen_shared.settings import QWEN2_CLIPS, Geometry, PixelSettings, VideoSettings, read_settings
from mmjax.models.qwen_shared.sizes import (
    count_windows,
    fewest_blocks,
    most_blocks,
    smart_resize,
    worst_window_ratio,
)
from mmjax.models.vision_inputs import VisionInputs


@dataclass(frozen=True)
class QwenProcessor:
    """`Processor` of the Qwen VL families. Methods are pure and may run in any thread.

    Attributes:
      geometry: sides of patches, merge blocks and temporal steps.
      window_side: merge blocks along one side of an attention window; 0 without windows.
      tokens_per_second: how fast rotary time runs in clips; None: one position a temporal step.
    """

    image_settings: PixelSettings
    video_settings: VideoSettings
    geometry: Geometry
    window_side: int
    tokens_per_second: float | None
    placeholder_id: Mapping[Modality, int]
    never_sampled: tuple[int, ...]
    placeholder_text: Mapping[Modality, str]
    special_ids: tuple[int, ...] = ()

    @classmethod
    def from_checkpoint(cls, cfg: QwenConfig, path: Path | str) -> QwenProcessor:
        """Processor of the checkpoint in the directory `path`. Raises CheckpointError for unusable settings."""
        return cls(**cls._fields(cfg, Path(path), QWEN2_CLIPS))

    @staticmethod
    def _fields(cfg: QwenConfig, path: Path, clip_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of this class for the checkpoint in `path`; `clip_defaults` as in `read_settings`."""
        vision = cfg.vision
        if vision.in_channels != CHANNELS:
            raise CheckpointError(
                f"config.json: vision_config.in_channels is {vision.in_channels}, expected {CHANNELS}"
            )
        geometry = Geometry(vision.patch_size, vision.merge, vision.temporal_patch_size)
        image, video = read_settings(path, geometry, clip_defaults)
        return {
            "image_settings": image,
            "video_settings": video,
            "geometry": geometry,
            "window_side": math.isqrt(cfg.window_capacity) // vision.merge,
            "tokens_per_second": getattr(vision, "tokens_per_second", None),
            "placeholder_id": {Modality.IMAGE: cfg.image_token_id, Modality.VIDEO: cfg.video_token_id},
            "never_sampled": cfg.never_sampled,
            "placeholder_text": {Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"},
        }

    def resolve(self, modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
        """Every option with its value. Raises RequestError for unknown names and unusable values."""
        if modality is Modality.IMAGE:
            return resolve_image(self.image_settings, options)
        if modality is Modality.VIDEO:
            return resolve_video(self.video_settings, options)
        raise RequestError(f"this model takes images and videos, not {modality}")

    def plan_image(self, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan:
        """Plan of a picture of `height` x `width` pixels, after EXIF orientation."""
        options = self.resolve(Modality.IMAGE, options)
        rows, columns = smart_resize(height, width, self.geometry.factor, options["min_pixels"], options["max_pixels"])
        warnings = shrink_warnings((height, width), (rows, columns), "max_pixels")
        return self._plan(Modality.IMAGE, 1, rows, columns, options, warnings)

    def sample_frames(self, metadata: VideoMetadata, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Source indices of the frames that the model is to see. A decoder that keeps just these saves the rest.

        Of a clip whose frames are already a choice (`frames_indices` is not the whole source), that choice.
        """
        options = self.resolve(Modality.VIDEO, options)
        total, given = metadata.total_num_frames, metadata.frames_indices
        if total < 1 or not given:
            raise RequestError("a video of 0 frames")
        if not options["do_sample_frames"] or given != tuple(range(total)):
            return given
        return tuple(self._choose_frames(total, metadata.rate, options).tolist())

    def plan_video(self, metadata: VideoMetadata, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan:
        """Plan of a clip with frames of `height` x `width` pixels; an odd last frame fills its temporal step alone."""
        options = self.resolve(Modality.VIDEO, options)
        frames = len(self.sample_frames(metadata, options))
        if frames > options["max_frames"]:
            raise RequestError(
                f"a video of {frames} frames, more than max_frames={options['max_frames']}; "
                "pass fps or num_frames to sample it"
            )
        rows, columns = self._clip_size(frames, height, width, options)
        warnings = shrink_warnings((height, width), (rows, columns), "max_pixels")
        if metadata.fps is None:
            sampled_fps = metadata.rate
            warnings += (f"the clip's frame rate is unknown; {metadata.rate:g} frames a second are assumed",)
        else:
            sampled_fps = frames / metadata.total_num_frames * metadata.fps
        steps = -(-frames // self.geometry.temporal)
        return self._plan(Modality.VIDEO, steps, rows, columns, options, warnings, self.geometry.temporal / sampled_fps)

    def image(self, rgb: UInt8[np.ndarray, "height width 3"], options: Mapping[str, Any]) -> ProcessedItem:
        """A picture as patches; its one frame is repeated to fill a temporal step."""
        check_pixels("a picture", rgb, ("height", "width"))
        plan = self.plan_image(*rgb.shape[:2], options)
        return ProcessedItem(plan, self._patches(rgb[None], plan, self.image_settings.filter))

    def video(
        self,
        frames: UInt8[np.ndarray, "frames height width 3"],
        metadata: VideoMetadata,
        options: Mapping[str, Any],
    ) -> ProcessedItem:
        """A clip as patches. `frames` are those that `metadata.frames_indices` names; sampling picks among them."""
        check_pixels("a video", frames, ("frames", "height", "width"))
        if len(frames) != len(metadata.frames_indices):
            raise RequestError(f"{len(frames)} frames, but frames_indices names {len(metadata.frames_indices)}")
        plan = self.plan_video(metadata, *frames.shape[1:3], options)
        kept = self.sample_frames(metadata, plan.options)
        if len(kept) != len(frames):
            frames = frames[list(kept)]
        return ProcessedItem(plan, self._patches(frames, plan, self.video_settings.filter))

    def positions(
        self, token_ids: Int32[np.ndarray, "S"], spans: Sequence[tuple[int, ItemPlan]]
    ) -> tuple[Int32[np.ndarray, "3 S"], int]:
        """Rotary positions of the whole prompt and the delta of decoding, see `mrope_positions`."""
        return mrope_positions(len(token_ids), spans, self.geometry.merge, self.tokens_per_second)

    def max_tokens_per_item(self) -> dict[Modality, int]:
        """Patches of the largest picture under the checkpoint's limits, and of a clip that is no larger.

        A clip has no limit that an engine could be sized by (768 frames would be a million patches): longer ones run in
        parts, see `inputs.parts`.
        """
        image = self._most_blocks(self.image_settings) * self.geometry.merge**2
        video = self._most_blocks(self.video_settings) * self.geometry.merge**2 * self._most_steps()
        return {Modality.IMAGE: image, Modality.VIDEO: min(video, image)}

    def worst_contexts(self, tokens: int) -> int:
        """Attention contexts that one item of `tokens` patches may have at most: one a temporal step."""
        return max(1, min(self._most_steps(), tokens // self.geometry.merge**2))

    def worst_windows(self, total_tokens: int) -> int:
        """Window rows that items of `total_tokens` patches in all need at most, under the checkpoint's limits."""
        if not self.window_side:
            return 0
        both = (self.image_settings, self.video_settings)
        fewest = min(fewest_blocks(self.geometry.factor, s.min_pixels, s.max_pixels) for s in both)
        windows, blocks = worst_window_ratio(self.window_side, fewest, max(map(self._most_blocks, both)))
        return total_tokens // self.geometry.merge**2 * windows // blocks

    def pixel_table(self) -> Float32[np.ndarray, "3 256"]:
        """What the tower sees of each byte."""
        return byte_table(self.image_settings.normalisation)

    def pack(self, items: Sequence[ProcessedItem], bucket: EncoderBucket) -> VisionInputs:
        """Freshly made inputs of one encoder call, padded to `bucket`, see `pack_items`."""
        patch, temporal = self.geometry.patch, self.geometry.temporal
        return pack_items(
            items,
            bucket,
            patch_values=CHANNELS * temporal * patch * patch,
            merge=self.geometry.merge,
            window_side=self.window_side,
        )

    def _most_blocks(self, settings: PixelSettings) -> int:
        return most_blocks(self.geometry.factor, settings.min_pixels, settings.max_pixels)

    def _most_steps(self) -> int:
        return -(-self.video_settings.max_frames // self.geometry.temporal)

    def _choose_frames(self, total: int, rate: float, options: Mapping[str, Any]) -> Int64[np.ndarray, "frames"]:
        """Indices of the frames to keep of a whole source."""
        return sample_frames(total, rate, options, self.geometry.temporal)

    def _clip_size(self, frames: int, height: int, width: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Height and width in pixels that the frames of a clip are resized to."""
        max_pixels = self._max_frame_pixels(frames, options)
        return smart_resize(height, width, self.geometry.factor, options["min_pixels"], max_pixels)

    def _max_frame_pixels(self, frames: int, options: Mapping[str, Any]) -> int:
        """`max_pixels`, or with `cap_pixels_per_frame` an even share of the clip's budget if that is less."""
        if not options["cap_pixels_per_frame"]:
            return options["max_pixels"]
        budget = int(self.video_settings.max_video_tokens * self.geometry.factor**2 * 0.9)
        share = budget * self.geometry.temporal // frames
        return max(min(options["max_pixels"], share), int(options["min_pixels"] * 1.05))

    def _plan(
        self,
        modality: Modality,
        steps: int,
        rows: int,
        columns: int,
        options: dict[str, Any],
        warnings: tuple[str, ...],
        seconds_per_step: float | None = None,
    ) -> ItemPlan:
        """Plan of `steps` temporal steps of frames of `rows` x `columns` pixels after resizing."""
        height, width = rows // self.geometry.patch, columns // self.geometry.patch
        blocks = (rows // self.geometry.factor, columns // self.geometry.factor)
        ids = np.full(steps * blocks[0] * blocks[1], self.placeholder_id[modality], np.int32)
        return ItemPlan(
            modality=modality,
            grid=(steps, height, width),
            rows=len(ids),
            contexts=(height * width,) * steps,
            windows=steps * count_windows(*blocks, self.window_side) if self.window_side else 0,
            span_ids=ids,
            span_embed=np.ones(len(ids), bool),
            seconds_per_step=seconds_per_step,
            options=options,
            warnings=warnings,
        )

    def _patches(
        self, frames: UInt8[np.ndarray, "frames height width 3"], plan: ItemPlan, kind: Filter
    ) -> UInt8[np.ndarray, "P values"]:
        """Resized patches in merge-block order, each (channel, time, row, column); the last frame fills up its step."""
        patch, merge, temporal = self.geometry.patch, self.geometry.merge, self.geometry.temporal
        steps, height, width = plan.grid
        blocks = (height // merge, width // merge)
        out = np.empty((steps, *blocks, merge, merge, CHANNELS, temporal, patch, patch), np.uint8)
        for index in range(steps * temporal):
            target = out[index // temporal, ..., index % temporal, :, :]
            if index < len(frames):
                last = target
                target[:] = merge_blocks(resize(frames[index], height * patch, width * patch, kind), patch, merge)
            else:
                target[:] = last
        return out.reshape(steps * height * width, -1)
