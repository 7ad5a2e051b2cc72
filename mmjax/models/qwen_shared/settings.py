# SPDX-License-Identifier: Apache-2.0
"""Settings of a checkpoint's image and video processors, read from the files that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.images.normalisation import Normalisation
from mmjax.models.images.resize import Filter
from mmjax.models.images.settings_file import SettingsFile, first_of, load_settings


@dataclass(frozen=True)
class Geometry:
    """Sides of a patch (pixels) and of a merge block (patches), and frames of a temporal step."""

    patch: int
    merge: int
    temporal: int

    @property
    def factor(self) -> int:
        """Side of a merge block in pixels."""
        return self.patch * self.merge


@dataclass(frozen=True)
class PixelSettings:
    """Settings of the image processor, and what the video processor shares with it. Limits are areas of one frame."""

    min_pixels: int
    max_pixels: int
    filter: Filter
    normalisation: Normalisation


@dataclass(frozen=True)
class VideoSettings(PixelSettings):
    """`fps` and `num_frames` (at most one is set) count only with `do_sample_frames`.

    With `cap_pixels_per_frame` the clip as a whole is held to nine tenths of `max_video_tokens` merge blocks.
    """

    do_sample_frames: bool
    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool
    max_video_tokens: int


# What transformers' Qwen2VLVideoProcessor assumes; the rest is as for pictures.
QWEN2_CLIPS: Mapping[str, Any] = {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}}


def read_settings(
    folder: Path, geometry: Geometry, clip_defaults: Mapping[str, Any] = QWEN2_CLIPS
) -> tuple[PixelSettings, VideoSettings]:
    """Settings of the checkpoint in `folder`; what its files leave out has the value of transformers' classes.

    transformers 5 nests both processors in processor_config.json; before, each had a file, and a checkpoint without
    the video one used the image one for clips as well. Raises CheckpointError, naming file and key.

    Args:
      clip_defaults: what the family's video processor assumes where the file names nothing.
    """
    nested, image, video = (
        load_settings(folder / name)
        for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    )
    image = first_of(nested and nested.section("image_processor"), image)
    video = first_of(nested and nested.section("video_processor"), video, image)
    for file in (image, video):
        _check(file, geometry)
    pixels = _pixels(image, 56 * 56, 28 * 28 * 1280)
    clip = _video(_with_clip_defaults(video, clip_defaults), clip_defaults["size"])
    if pixels.normalisation != clip.normalisation:
        raise CheckpointError(
            f"{video.name} normalises pixels unlike {image.name}: {clip.normalisation} and {pixels.normalisation}; "
            "one table of byte values must serve both"
        )
    return pixels, clip


def _with_clip_defaults(file: SettingsFile, defaults: Mapping[str, Any]) -> SettingsFile:
    """The file with the class's values for what is missing; a number of frames puts the class's rate aside."""
    counted = file.positive("num_frames") is not None
    return file.with_defaults({key: value for key, value in defaults.items() if not (counted and key == "fps")})


def _check(file: SettingsFile, geometry: Geometry) -> None:
    """Refuses what the tower of config.json or this code can't follow."""
    file.require_side("patch_size", geometry.patch)
    file.require_side("merge_size", geometry.merge)
    file.require_side("temporal_patch_size", geometry.temporal)
    file.require_resize()


def _pixels(file: SettingsFile, min_pixels: int, max_pixels: int) -> PixelSettings:
    size = file.section("size") or SettingsFile(file.name, {})
    # Older names win over `size`, as they do in transformers; some old files write them inside `size`.
    least = file.positive("min_pixels", size.positive("shortest_edge", size.positive("min_pixels", min_pixels)))
    most = file.positive("max_pixels", size.positive("longest_edge", size.positive("max_pixels", max_pixels)))
    if least > most:
        raise file.error("size", f"allows at least {least} and at most {most} pixels")
    return PixelSettings(
        min_pixels=least,
        max_pixels=most,
        filter=file.filter(),
        normalisation=Normalisation.from_file(file),
    )


def _video(file: SettingsFile, size: Mapping[str, int]) -> VideoSettings:
    pixels = _pixels(file, size["shortest_edge"], size["longest_edge"])
    fps, num_frames = file.number("fps"), file.positive("num_frames")
    if fps is not None and num_frames is not None:
        raise file.error("fps", f"is {fps} and num_frames is {num_frames}; only one of them can be set")
    return VideoSettings(
        **vars(pixels),
        do_sample_frames=file.flag("do_sample_frames", False),
        fps=fps,
        num_frames=num_frames,
        min_frames=file.positive("min_frames", 4),
        max_frames=file.positive("max_frames", 768),
        cap_pixels_per_frame=file.flag("cap_pixels_per_frame", False),
        max_video_tokens=file.positive("max_video_tokens", 128000),
    )
