# SPDX-License-Identifier: Apache-2.0
"""Settings of a checkpoint's image and video processors, read from the files that transformers writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.qwen_shared.resize import Filter

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_FILTERS: dict[int, Filter] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


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
class Normalisation:
    """What happens to a byte before the tower sees it."""

    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]


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


def read_settings(folder: Path, geometry: Geometry) -> tuple[PixelSettings, VideoSettings]:
    """Settings of the checkpoint in `folder`; what its files leave out has the value of transformers' classes.

    transformers 5 nests both processors in processor_config.json; before, each had a file, and a checkpoint without
    the video one used the image one for clips as well. Raises CheckpointError, naming file and key.
    """
    nested, image, video = (
        _load(folder / name)
        for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    )
    image = _first(nested and nested.section("image_processor"), image)
    video = _first(nested and nested.section("video_processor"), video, image)
    for file in (image, video):
        file.check(geometry)
    pixels = _pixels(image, 56 * 56, 28 * 28 * 1280)
    clip = _video(video)
    if pixels.normalisation != clip.normalisation:
        raise CheckpointError(
            f"{video.name} normalises pixels unlike {image.name}: {clip.normalisation} and {pixels.normalisation}; "
            "one table of byte values must serve both"
        )
    return pixels, clip


class _File:
    """A JSON object of a processor file; every error names the file and the key."""

    def __init__(self, name: str, values: Mapping[str, Any]):
        self.name = name
        self._values = values

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {key} {problem}")

    def section(self, key: str) -> _File | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        return _File(f"{self.name}, {key}", value)

    def get(self, key: str, default: Any, valid: Callable[[Any], bool], expected: str) -> Any:
        value = self._values.get(key)
        if value is None:
            return default
        if not valid(value):
            raise self.error(key, f"must be {expected}, got {value!r}")
        return value

    def positive(self, key: str, default: Any = None) -> Any:
        return self.get(key, default, lambda v: type(v) is int and v > 0, "a positive integer")

    def number(self, key: str, default: Any = None) -> Any:
        return self.get(key, default, _is_positive_number, "a positive number")

    def flag(self, key: str, default: bool) -> bool:
        return self.get(key, default, lambda v: isinstance(v, bool), "true or false")

    def channels(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        def valid(value: Any) -> bool:
            return isinstance(value, list) and len(value) == 3 and all(isinstance(v, int | float) for v in value)

        return tuple(self.get(key, default, valid, "a list of three numbers"))

    def check(self, geometry: Geometry) -> None:
        """Refuses what the tower of config.json or this code can't follow."""
        sides = {
            "patch_size": geometry.patch,
            "merge_size": geometry.merge,
            "temporal_patch_size": geometry.temporal,
        }
        for key, side in sides.items():
            if self.positive(key, side) != side:
                raise self.error(key, f"is {self._values[key]}, but config.json says {side}")
        if not self.flag("do_resize", True):
            raise self.error("do_resize", "is false; pictures of any size need it")


def _load(path: Path) -> _File | None:
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: can't be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name}: must be a JSON object")
    return _File(path.name, values)


def _first(*files: _File | None) -> _File:
    return next((file for file in files if file is not None), _File("processor defaults", {}))


def _pixels(file: _File, min_pixels: int, max_pixels: int) -> PixelSettings:
    size = file.section("size") or _File(file.name, {})
    # Older names win over `size`, as they do in transformers; some old files write them inside `size`.
    least = file.positive("min_pixels", size.positive("shortest_edge", size.positive("min_pixels", min_pixels)))
    most = file.positive("max_pixels", size.positive("longest_edge", size.positive("max_pixels", max_pixels)))
    if least > most:
        raise file.error("size", f"allows at least {least} and at most {most} pixels")
    resample = file.get("resample", 3, _FILTERS.__contains__, "2 (bilinear) or 3 (bicubic)")
    std = file.channels("image_std", _CLIP_STD)
    if 0 in std:
        raise file.error("image_std", f"must not hold zeros, got {list(std)}")
    return PixelSettings(
        min_pixels=least,
        max_pixels=most,
        filter=_FILTERS[resample],
        normalisation=Normalisation(
            do_rescale=file.flag("do_rescale", True),
            rescale_factor=float(file.number("rescale_factor", 1 / 255)),
            do_normalize=file.flag("do_normalize", True),
            mean=file.channels("image_mean", _CLIP_MEAN),
            std=std,
        ),
    )


def _video(file: _File) -> VideoSettings:
    pixels = _pixels(file, 128 * 28 * 28, 768 * 28 * 28)
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


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
