# SPDX-License-Identifier: Apache-2.0
"""Host side of LightOnOCR: sizes, patches and spans, as transformers' LightOnOcrProcessor makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from mmjax.errors import RequestError
from mmjax.inputs.items import EncoderBucket, ItemPlan, Modality, ProcessedItem
from mmjax.models.images.normalisation import CHANNELS
from mmjax.models.images.patches import check_pixels, merge_blocks
from mmjax.models.images.resize import resize
from mmjax.models.images.shrink import shrink_warnings
from mmjax.models.lighton_ocr.packing import pack_pictures, patch_order
from mmjax.models.lighton_ocr.settings import Placeholder, read_settings
from mmjax.models.pixtral_shared.config import PixtralConfig
from mmjax.models.pixtral_shared.processing import PixtralProcessor
from mmjax.models.pixtral_shared.sizes import largest_side, stretched_size
from mmjax.models.vision_inputs import VisionInputs


@dataclass(frozen=True)
class LightOnOcrProcessor(PixtralProcessor):
    """Pixtral's processor, but spans are placeholders alone, and sides need not be multiples of a merge block.

    Attributes:
      unit: pixels that both sides of a picture are multiples of: a patch, or several.
    """

    tokens: Placeholder
    unit: int

    @classmethod
    def from_checkpoint(cls, cfg: PixtralConfig, path: Path | str) -> LightOnOcrProcessor:
        """Processor of the checkpoint in the directory `path`. Raises CheckpointError for unusable settings."""
        patch, merge = cfg.vision.patch_size, cfg.vision.merge
        settings, tokens, unit = read_settings(Path(path), patch=patch, merge=merge, image_token_id=cfg.image_token_id)
        return cls(settings, tokens, patch, merge, unit)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """None: the tokenizer has tokens for ends of rows and pictures, which spans leave out."""
        return ()

    def plan_image(self, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan:
        """Plan of a picture of `height` x `width` pixels, after EXIF orientation.

        A second context of at most `merge**2 - 1` patches of padding brings it to a multiple of `merge**2`.
        """
        options = self.resolve(Modality.IMAGE, options)
        size = stretched_size(height, width, self.unit, options["longest_edge"])
        high, wide = (side // self.patch for side in size)
        rows = (high // self.merge) * (wide // self.merge)
        if not rows:
            raise RequestError(
                f"a picture {height} high and {width} wide is too thin: it has {high} x {wide} patches, "
                f"and {self.merge} x {self.merge} make one row"
            )
        padding = -high * wide % self.merge**2
        return ItemPlan(
            modality=Modality.IMAGE,
            grid=(1, high, wide),
            rows=rows,
            contexts=(high * wide, padding) if padding else (high * wide,),
            windows=0,
            span_ids=np.full(rows, self.tokens.image, np.int32),
            span_embed=np.ones(rows, bool),
            options=options,
            warnings=shrink_warnings((height, width), size, "longest_edge"),
        )

    def image(self, rgb: UInt8[np.ndarray, "height width 3"], options: Mapping[str, Any]) -> ProcessedItem:
        """A picture as patches in the order of `patch_order`, each (channel, row, column), then zeros."""
        check_pixels("a picture", rgb, ("height", "width"))
        plan = self.plan_image(*rgb.shape[:2], options)
        _, high, wide = plan.grid
        planes = resize(rgb, high * self.patch, wide * self.patch, self.settings.filter)
        row_major = merge_blocks(planes, self.patch, 1).reshape(high * wide, -1)
        patches = np.zeros((plan.encoder_tokens, row_major.shape[1]), np.uint8)
        patches[: high * wide] = row_major[patch_order(high, wide, self.merge)]
        return ProcessedItem(plan, patches)

    def max_tokens_per_item(self) -> dict[Modality, int]:
        """Patches of the largest picture under the checkpoint's limit, with its padding."""
        side, block = largest_side(self.unit, self.settings.longest_edge) // self.patch, self.merge**2
        return {Modality.IMAGE: -(-(side**2) // block) * block}

    def worst_contexts(self, tokens: int) -> int:
        """Attention contexts of one item: the picture, and its padding."""
        return 2

    def pack(self, items: Sequence[ProcessedItem], bucket: EncoderBucket) -> VisionInputs:
        """Freshly made inputs of one encoder call, padded to `bucket`, see `pack_pictures`."""
        return pack_pictures(items, bucket, patch_values=CHANNELS * self.patch**2, merge=self.merge)
