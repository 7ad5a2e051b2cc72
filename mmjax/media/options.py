# SPDX-License-Identifier: Apache-2.0
"""Limits and choices that hold for all media of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.errors import MediaError


@dataclass(frozen=True)
class MediaOptions:
    """How media are fetched and decoded.

    Attributes:
      image_background: RGB colour behind transparent pixels.
      max_image_pixels: pictures and frames with more pixels are refused before they are decoded.
      max_clip_bytes: most bytes of the decoded frames of one clip.
      allowed_local_media: accept paths and file: URLs.
      allow_private_hosts: let URLs resolve to addresses that are not globally routable.
      max_bytes: largest encoded file, fetched or read.
      timeout: seconds that fetching one item may take in all.
    """

    image_background: tuple[int, int, int] = (255, 255, 255)
    max_image_pixels: int = 178_956_970
    max_clip_bytes: int = 2 << 30
    allowed_local_media: bool = True
    allow_private_hosts: bool = False
    max_bytes: int = 200 << 20
    timeout: float = 30.0

    def check_size(self, height: int, width: int, item: int | None) -> None:
        """Raises MediaError for a picture without pixels or with too many."""
        if height * width == 0:
            raise MediaError(f"a picture of {height} x {width} pixels", item=item)
        if height * width > self.max_image_pixels:
            raise MediaError(
                f"{height} x {width} = {height * width} pixels, more than max_image_pixels={self.max_image_pixels}",
                item=item,
            )

    def check_clip(self, frames: int, height: int, width: int, item: int | None) -> None:
        """Raises MediaError for a clip without frames, or whose frames would take too much memory."""
        if frames == 0:
            raise MediaError("a video of 0 frames", item=item)
        self.check_size(height, width, item)
        size = frames * height * width * 3
        if size > self.max_clip_bytes:
            raise MediaError(
                f"{frames} frames of {height} x {width} pixels take {size} bytes, more than the limit of "
                f"{self.max_clip_bytes}; keep fewer frames (fps or num_frames)",
                item=item,
            )
