# SPDX-License-Identifier: Apache-2.0
"""Clips: video files, animations, arrays and lists of pictures become uint8 RGB frames with metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from mmjax.errors import MediaError
from mmjax.inputs.items import VideoMetadata
from mmjax.media.animation import AnimationReader
from mmjax.media.encoded import is_encoded, read_bytes
from mmjax.media.images import ImageSource, rgb_array
from mmjax.media.options import MediaOptions
from mmjax.media.video_file import VideoFileReader

# From a clip's metadata to the indices of the frames to keep.
FrameChooser = Callable[[VideoMetadata], Sequence[int]]


@dataclass(frozen=True, eq=False)
class DecodedClip:
    """Frames and what is known about them; `metadata.frames_indices` names the frames in the source."""

    frames: UInt8[np.ndarray, "frames height width 3"]
    metadata: VideoMetadata
    warnings: tuple[str, ...] = ()


class ClipReader(Protocol):
    """A file of frames, opened anew for every reading."""

    total: int  # frames that the header claims or a count found
    fps: float | None
    size: tuple[int, int]  # (height, width), upright

    def read(self, wanted: Sequence[int] | None) -> tuple[list[np.ndarray], list[int], int | None]:
        """Frames, their indices, and the number of frames in all if the end was reached.

        `wanted`: ascending indices; None: all. Frames that can't be decoded are left out.
        """


@dataclass(frozen=True, eq=False)
class ClipSource:
    """One clip, kept so that it can be decoded again and again, from any thread.

    Attributes:
      size: (height, width) of every frame, in pixels.
      metadata: as far as known before decoding.
      reader: of an encoded clip; None if the caller gave frames.
      frames: a private uint8 RGB copy of the caller's frames, read-only; None if the caller gave a file.
    """

    size: tuple[int, int]
    metadata: VideoMetadata
    reader: ClipReader | None
    frames: UInt8[np.ndarray, "frames height width 3"] | None
    options: MediaOptions
    warnings: tuple[str, ...] = ()
    item: int | None = None

    @classmethod
    def open(
        cls,
        value: object,
        options: MediaOptions,
        item: int | None = None,
        *,
        metadata: VideoMetadata | Mapping[str, Any] | None = None,
        channels_first: bool = False,
    ) -> ClipSource:
        """Takes a video file or animation (path, URL, data URL, bytes), a uint8 array, or a list of pictures.

        Arrays are frames x height x width x channels unless `channels_first`. `metadata` tells the source's `fps`,
        `total_num_frames` and `frames_indices`; what a file says itself yields to it. A pair (frames, metadata) is
        taken apart. Raises MediaError, naming `item`.
        """
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | VideoMetadata):
            value, metadata = value
        if is_encoded(value):
            reader = _open_reader(read_bytes(value, options, item), options, item)
            found, warnings = file_metadata(reader, metadata, item)
            return cls(reader.size, found, reader, None, options, warnings, item)
        frames = _stack(value, options, item, channels_first)
        found, warnings = frames_metadata(len(frames), metadata, item)
        return cls(frames.shape[1:3], found, None, frames, options, warnings, item)

    def decode(self, choose: FrameChooser | None = None) -> DecodedClip:
        """Frames, of those that are there only what `choose` wants.

        If a file holds fewer frames than it claims, the choice is made again from what is there.
        """
        if self.reader is None:
            return self._choose(choose)
        metadata, warnings = self.metadata, self.warnings
        frames, indices, total = self._read(metadata, choose)
        if total is not None and total != metadata.total_num_frames:
            warnings += (f"the file claims {metadata.total_num_frames} frames and holds {total}",)
            metadata = _whole(total, metadata.fps)
            if choose is not None and total:
                frames, indices, _ = self._read(metadata, choose)
        if not frames:
            raise MediaError("a video of 0 frames", item=self.item)
        kept = VideoMetadata(metadata.total_num_frames, metadata.fps, tuple(indices), metadata.duration)
        return DecodedClip(np.stack(frames), kept, warnings)

    def _choose(self, choose: FrameChooser | None) -> DecodedClip:
        """Of frames that the caller gave, those that are wanted."""
        given = self.metadata.frames_indices
        wanted = given if choose is None else tuple(choose(self.metadata))
        if wanted == given:
            return DecodedClip(self.frames, self.metadata, self.warnings)
        place = {index: position for position, index in enumerate(given)}
        frames = self.frames[[place[index] for index in wanted]]
        return DecodedClip(frames, replace(self.metadata, frames_indices=wanted), self.warnings)

    def _read(
        self, metadata: VideoMetadata, choose: FrameChooser | None
    ) -> tuple[list[np.ndarray], list[int], int | None]:
        wanted = None if choose is None else sorted(set(choose(metadata)))
        count = metadata.total_num_frames if wanted is None else len(wanted)
        self.options.check_clip(count, *self.size, self.item)
        return self.reader.read(wanted)


def frames_metadata(
    count: int, given: VideoMetadata | Mapping[str, Any] | None, item: int | None = None
) -> tuple[VideoMetadata, tuple[str, ...]]:
    """Metadata of `count` frames that lie before us, and warnings.

    Without `frames_indices`, a claimed total that differs from `count` is wrong: the frames win.
    Raises MediaError: no frames, a rate that is not a positive number, indices that don't fit.
    """
    if count == 0:
        raise MediaError("a video of 0 frames", item=item)
    fps, claimed, indices = _claims(given, item)
    if indices is None:
        warnings = ()
        if claimed not in (None, count):
            warnings = (f"metadata claims {claimed} frames; the video has {count}",)
        return _whole(count, fps), warnings
    if len(indices) != count:
        raise MediaError(f"frames_indices names {len(indices)} frames; the video has {count}", item=item)
    total = max(indices) + 1 if claimed is None else claimed
    if min(indices) < 0 or max(indices) >= total or list(indices) != sorted(indices):
        raise MediaError(f"frames_indices must ascend within 0..{total - 1}", item=item)
    return VideoMetadata(total, fps, indices, None if fps is None else total / fps), ()


def file_metadata(
    reader: ClipReader, given: VideoMetadata | Mapping[str, Any] | None, item: int | None = None
) -> tuple[VideoMetadata, tuple[str, ...]]:
    """Metadata of a file; of what the caller says, only the rate counts, since the frames are numbered by the file."""
    fps, _, _ = _claims(given, item)
    return _whole(reader.total, reader.fps if fps is None else fps), ()


def _claims(
    given: VideoMetadata | Mapping[str, Any] | None, item: int | None
) -> tuple[float | None, int | None, tuple[int, ...] | None]:
    """Checked `fps`, `total_num_frames` and `frames_indices`."""
    if given is None:
        return None, None, None
    values = vars(given) if isinstance(given, VideoMetadata) else given
    fps, total, indices = (values.get(name) for name in ("fps", "total_num_frames", "frames_indices"))
    if fps is not None:
        if isinstance(fps, bool) or not isinstance(fps, Real) or not math.isfinite(fps) or fps <= 0:
            raise MediaError(f"fps must be a positive number of frames a second, got {fps!r}", item=item)
        fps = float(fps)
    if total is not None and (isinstance(total, bool) or not isinstance(total, int | np.integer) or total < 1):
        raise MediaError(f"total_num_frames must be a positive integer, got {total!r}", item=item)
    return fps, total, None if indices is None else tuple(int(index) for index in indices)


def _whole(total: int, fps: float | None) -> VideoMetadata:
    return VideoMetadata(total, fps, tuple(range(total)), None if fps is None else total / fps)


def _open_reader(encoded: bytes, options: MediaOptions, item: int | None) -> ClipReader:
    if AnimationReader.knows(encoded):
        return AnimationReader(encoded, options, item)
    return VideoFileReader(encoded, options, item)


def _stack(value: object, options: MediaOptions, item: int | None, channels_first: bool) -> np.ndarray:
    """A private, read-only copy of frames."""
    if hasattr(value, "__array__") and not isinstance(value, Image.Image):
        value = np.asarray(value)
        if value.ndim != 4:
            raise MediaError(
                f"a video array is frames x height x width x channels, got {' x '.join(map(str, value.shape))}",
                item=item,
            )
        options.check_clip(len(value), *(value.shape[2:] if channels_first else value.shape[1:3]), item)
        frames = [rgb_array(frame, options, item, channels_first=channels_first) for frame in value]
    elif isinstance(value, Sequence):
        frames = []
        for frame in value:
            frames.append(ImageSource.open(frame, options, item, channels_first=channels_first).decode())
            options.check_clip(len(frames), *frames[0].shape[:2], item)
    else:
        raise MediaError(
            f"expected a path, URL, bytes, uint8 array or list of pictures, got {type(value).__name__}", item=item
        )
    if not frames:
        raise MediaError("a video of 0 frames", item=item)
    for index, frame in enumerate(frames):
        if frame.shape != frames[0].shape:
            sizes = " and ".join(f"{f.shape[0]} x {f.shape[1]}" for f in (frames[0], frame))
            raise MediaError(f"frames 0 and {index} differ in size: {sizes}", item=item)
    stacked = np.stack(frames)
    stacked.flags.writeable = False
    return stacked
