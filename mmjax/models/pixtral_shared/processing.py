# SPDX-License-Identifier: Apache-2.0
"""Host side of Mistral3 and Pixtral-12B: sizes, patches and spans, as transformers' Pixtral processors make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt8

from mmjax.errors import RequestError
from mmjax.inputs.items import EncoderBucket, ItemPlan, Modality, ProcessedItem, VideoMetadata
from mmjax.models.decoder.positions import plain_positions
from mmjax.models.images.normalisation import CHANNELS, byte_table
from mmjax.models.images.packing import pack_items
from mmjax.models.images.patches import check_pixels, merge_blocks
from mmjax.models.images.resize import resize
from mmjax.models.images.shrink import shrink_warnings
from mmjax.models.pixtral_shared.config import PixtralConfig
from mmjax.models.pixtral_shared.settings import ImageTokens, PixelSettings, read_settings, resolve_image
from mmjax.models.pixtral_shared.sizes import largest_side, stretched_size
from mmjax.models.vision_inputs import VisionInputs


@dataclass(frozen=True)
class PixtralProcessor:
    """`Processor` of the families with a Pixtral tower. Methods are pure and may run in any thread.

    Attributes:
      patch: pixels along one side of a patch.
      merge: patches along one side of the block that makes one row.
    """

    settings: PixelSettings
    tokens: ImageTokens
    patch: int
    merge: int

    @classmethod
    def from_checkpoint(cls, cfg: PixtralConfig, path: Path | str) -> PixtralProcessor:
        """Processor of the checkpoint in the directory `path`. Raises CheckpointError for unusable settings."""
        patch, merge = cfg.vision.patch_size, cfg.vision.merge
        settings, tokens = read_settings(Path(path), patch=patch, merge=merge, image_token_id=cfg.image_token_id)
        return cls(settings, tokens, patch, merge)

    @property
    def placeholder_text(self) -> Mapping[Modality, str]:
        return {Modality.IMAGE: self.tokens.text}

    @property
    def placeholder_id(self) -> Mapping[Modality, int]:
        return {Modality.IMAGE: self.tokens.image}

    @property
    def special_ids(self) -> tuple[int, ...]:
        return (self.tokens.row_end, self.tokens.end)

    @property
    def never_sampled(self) -> tuple[int, ...]:
        return (self.tokens.image, *self.special_ids)

    @property
    def factor(self) -> int:
        """Side of a merge block in pixels."""
        return self.patch * self.merge

    def resolve(self, modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
        """Every option with its value. Raises RequestError for unknown names, unusable values and other modalities."""
        if modality is not Modality.IMAGE:
            raise RequestError(f"this family has no {modality}; it takes images")
        return resolve_image(self.settings, options)

    def plan_image(self, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan:
        """Plan of a picture of `height` x `width` pixels, after EXIF orientation."""
        options = self.resolve(Modality.IMAGE, options)
        size = stretched_size(height, width, self.factor, options["longest_edge"])
        rows, columns = (side // self.factor for side in size)
        ids, embed = self._span(rows, columns)
        return ItemPlan(
            modality=Modality.IMAGE,
            grid=(1, rows * self.merge, columns * self.merge),
            rows=rows * columns,
            contexts=(rows * columns * self.merge**2,),
            windows=0,
            span_ids=ids,
            span_embed=embed,
            options=options,
            warnings=shrink_warnings((height, width), size, "longest_edge"),
        )

    def image(self, rgb: UInt8[np.ndarray, "height width 3"], options: Mapping[str, Any]) -> ProcessedItem:
        """A picture as patches in merge-block order, each (channel, row, column)."""
        check_pixels("a picture", rgb, ("height", "width"))
        plan = self.plan_image(*rgb.shape[:2], options)
        _, height, width = plan.grid
        planes = resize(rgb, height * self.patch, width * self.patch, self.settings.filter)
        patches = np.ascontiguousarray(merge_blocks(planes, self.patch, self.merge))
        return ProcessedItem(plan, patches.reshape(height * width, -1))

    def sample_frames(self, metadata: VideoMetadata, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Raises RequestError: there are no clips."""
        _refuse_video()

    def plan_video(self, metadata: VideoMetadata, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan:
        """Raises RequestError: there are no clips."""
        _refuse_video()

    def video(
        self, frames: UInt8[np.ndarray, "frames height width 3"], metadata: VideoMetadata, options: Mapping[str, Any]
    ) -> ProcessedItem:
        """Raises RequestError: there are no clips."""
        _refuse_video()

    def positions(
        self, token_ids: Int32[np.ndarray, "S"], spans: Sequence[tuple[int, ItemPlan]]
    ) -> tuple[Int32[np.ndarray, "1 S"], int]:
        """Rotary positions: the index in the prompt."""
        return plain_positions(len(token_ids))

    def max_tokens_per_item(self) -> dict[Modality, int]:
        """Patches of the largest picture under the checkpoint's limit."""
        side = largest_side(self.factor, self.settings.longest_edge) // self.patch
        return {Modality.IMAGE: side * side}

    def worst_contexts(self, tokens: int) -> int:
        """Attention contexts of one item: a picture is seen as a whole."""
        return 1

    def worst_windows(self, total_tokens: int) -> int:
        """There are no windows."""
        return 0

    def pixel_table(self) -> Float32[np.ndarray, "3 256"]:
        """What the tower sees of each byte."""
        return byte_table(self.settings.normalisation)

    def pack(self, items: Sequence[ProcessedItem], bucket: EncoderBucket) -> VisionInputs:
        """Freshly made inputs of one encoder call, padded to `bucket`, see `pack_items`."""
        return pack_items(items, bucket, patch_values=CHANNELS * self.patch**2, merge=self.merge, window_side=0)

    def _span(self, rows: int, columns: int) -> tuple[Int32[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Ids of a picture of `rows` x `columns` rows, and which of them take one."""
        ids = np.full((rows, columns + 1), self.tokens.image, np.int32)
        ids[:, -1] = self.tokens.row_end
        ids[-1, -1] = self.tokens.end
        embed = np.ones(ids.shape, bool)
        embed[:, -1] = False
        return ids.reshape(-1), embed.reshape(-1)


def _refuse_video() -> NoReturn:
    raise RequestError("this family has no video; it takes images")
