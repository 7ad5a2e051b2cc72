# SPDX-License-Identifier: Apache-2.0
"""Decoded media to items: sizes planned, pixels cut to patches, content named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8

from mmjax.inputs.hashing import ImageData, VideoData, item_digest
from mmjax.inputs.items import Modality, VideoMetadata
from mmjax.inputs.prompt import ItemInput
from mmjax.models.family import Processor


def image_item(
    rgb: UInt8[np.ndarray, "H W 3"],
    processor: Processor,
    options: Mapping[str, Any] | None = None,
    *,
    uuid: str | None = None,
    salt: str | None = None,
    source: Any = None,
    pixels: bool = True,
) -> ItemInput:
    """An image as an item.

    Args:
      rgb: what the model is to see, after orientation and compositing.
      options: processor options of the request; the item's key covers them with every default spelled out.
      source: what the image can be decoded from again.
      pixels: False plans and names the item but makes no patches.
    """
    resolved = processor.resolve(Modality.IMAGE, options or {})
    digest = item_digest(ImageData(rgb), uuid, salt)
    if not pixels:
        return ItemInput(processor.plan_image(rgb.shape[0], rgb.shape[1], resolved), None, digest, uuid, source)
    processed = processor.image(rgb, resolved)
    return ItemInput(processed.plan, processed.patches, digest, uuid, source)


def video_item(
    frames: UInt8[np.ndarray, "F H W 3"],
    metadata: VideoMetadata,
    processor: Processor,
    options: Mapping[str, Any] | None = None,
    *,
    uuid: str | None = None,
    salt: str | None = None,
    source: Any = None,
    source_digest: str | None = None,
    pixels: bool = True,
) -> ItemInput:
    """A clip as an item; see `image_item`. With `source_digest` the key reads that, not the frames."""
    resolved = processor.resolve(Modality.VIDEO, options or {})
    digest = item_digest(VideoData(frames, metadata, source_digest), uuid, salt)
    if not pixels:
        plan = processor.plan_video(metadata, frames.shape[1], frames.shape[2], resolved)
        return ItemInput(plan, None, digest, uuid, source)
    processed = processor.video(frames, metadata, resolved)
    return ItemInput(processed.plan, processed.patches, digest, uuid, source)
