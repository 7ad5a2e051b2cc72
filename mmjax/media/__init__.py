# SPDX-License-Identifier: Apache-2.0
"""From whatever a caller gives (path, URL, bytes, Pillow image, array) to pixels, frames and samples.

Opening fetches and looks at headers; decoding may be done many times. Both block, and both may run in any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from mmjax.inputs.items import Modality, VideoMetadata
from mmjax.media.audio import DecodedSound, SoundSource
from mmjax.media.images import ImageSource
from mmjax.media.options import MediaOptions
from mmjax.media.video import ClipSource, DecodedClip

MediaSource: TypeAlias = ImageSource | ClipSource | SoundSource

__all__ = [
    "ClipSource",
    "DecodedClip",
    "DecodedSound",
    "ImageSource",
    "MediaOptions",
    "MediaSource",
    "SoundSource",
    "open_media",
]


def open_media(
    modality: Modality,
    value: object,
    options: MediaOptions,
    item: int | None = None,
    *,
    metadata: VideoMetadata | Mapping[str, Any] | None = None,
    channels_first: bool = False,
) -> MediaSource:
    """The source of one item.

    Args:
      value: a path, URL, data URL, bytes, Pillow image, uint8 array, list of frames, or (samples, rate).
      item: prompt-order index that errors name.
      metadata: of clips: `fps`, `total_num_frames`, `frames_indices` of the source.
      channels_first: pixel arrays have their channels before height and width.

    Raises MediaError.
    """
    if modality == Modality.IMAGE:
        return ImageSource.open(value, options, item, channels_first=channels_first)
    if modality == Modality.VIDEO:
        return ClipSource.open(value, options, item, metadata=metadata, channels_first=channels_first)
    return SoundSource.open(value, options, item)
