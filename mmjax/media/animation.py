# SPDX-License-Identifier: Apache-2.0
"""Animated pictures (GIF, WebP, APNG) as clips, through Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmjax.errors import MediaError
from mmjax.media.images import decode_image, open_image_file, upright_size
from mmjax.media.options import MediaOptions

_FORMATS = ("GIF", "WEBP", "PNG")


class AnimationReader:
    """Reads an animation frame by frame. Its rate is the mean over its frames; a still has one frame and no rate."""

    def __init__(self, encoded: bytes, options: MediaOptions, item: int | None = None):
        self._encoded, self._options, self._item = encoded, options, item
        image = open_image_file(encoded, options, item)
        self.size = upright_size(image, encoded, item)
        try:
            self.total = getattr(image, "n_frames", 1)
        except Exception as error:  # see `images.py`: broken files raise almost anything
            raise MediaError(f"the animation can't be decoded: {error}", item=item) from error
        options.check_clip(self.total, *self.size, item)
        self.fps = self._rate(image) if self.total > 1 else None

    @staticmethod
    def knows(encoded: bytes) -> bool:
        """Whether the file has one of the formats that can be animated."""
        try:
            Image.open(io.BytesIO(encoded), formats=_FORMATS)
        except UnidentifiedImageError:
            return False
        except Exception:
            return True  # of that format, but broken: reading it says how
        return True

    def read(self, wanted: Sequence[int] | None) -> tuple[list[np.ndarray], list[int], int | None]:
        """See `ClipReader.read`. Frames build upon each other, so the first broken one ends the clip."""
        image = open_image_file(self._encoded, self._options, self._item)
        keep = range(self.total) if wanted is None else set(wanted)
        frames, indices = [], []
        for index in range(max(keep, default=-1) + 1):
            try:
                image.seek(index)
                pixels = decode_image(image, self._options, self._item) if index in keep else None
            except Exception:
                return frames, indices, index
            if pixels is not None:
                frames.append(pixels)
                indices.append(index)
        return frames, indices, None

    def _rate(self, image: Image.Image) -> float | None:
        milliseconds, frames = 0.0, 0
        for index in range(self.total):
            try:
                image.seek(index)
                image.load()  # WebP tells a frame's duration only then
            except Exception:
                break  # `read` will end here too
            milliseconds += image.info.get("duration", 0)
            frames += 1
        return 1000 * frames / milliseconds if milliseconds > 0 else None
