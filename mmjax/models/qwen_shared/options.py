# SPDX-License-Identifier: Apache-2.0
"""Processor options of a request, resolved against the checkpoint's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmjax.errors import RequestError
from mmjax.inputs.items import Modality
from mmjax.models.images.request_options import options_for
from mmjax.models.qwen_shared.settings import PixelSettings, VideoSettings

_INTEGERS = ("min_pixels", "max_pixels", "num_frames", "min_frames", "max_frames")
_FLAGS = ("do_sample_frames", "cap_pixels_per_frame")
_IMAGE = ("min_pixels", "max_pixels", "size")
_VIDEO = (*_IMAGE, "fps", "num_frames", "min_frames", "max_frames", *_FLAGS)


def resolve_image(settings: PixelSettings, options: Mapping[str, Any]) -> dict[str, Any]:
    """`min_pixels` and `max_pixels`."""
    return _limits(settings, _given(Modality.IMAGE, options))


def resolve_video(settings: VideoSettings, options: Mapping[str, Any]) -> dict[str, Any]:
    """Pixel limits of a frame and the rule of sampling; resolving the result again changes nothing.

    Asking for `fps` or `num_frames` turns sampling on unless `do_sample_frames` is false, as in transformers' chat
    templates, and puts the checkpoint's value of the other aside.
    """
    given = _given(Modality.VIDEO, options)
    asked = "fps" in given or "num_frames" in given
    if "fps" in given and "num_frames" in given:
        raise RequestError(f"fps={given['fps']} and num_frames={given['num_frames']} exclude each other")
    sample = given.get("do_sample_frames", asked or settings.do_sample_frames)
    rate = given if asked else {"fps": settings.fps, "num_frames": settings.num_frames}
    resolved = {
        **_limits(settings, given),
        "do_sample_frames": sample,
        "fps": rate.get("fps") if sample else None,
        "num_frames": rate.get("num_frames") if sample else None,
        "min_frames": given.get("min_frames", settings.min_frames),
        "max_frames": given.get("max_frames", settings.max_frames),
        "cap_pixels_per_frame": given.get("cap_pixels_per_frame", settings.cap_pixels_per_frame),
    }
    if resolved["min_frames"] > resolved["max_frames"]:
        raise RequestError(f"min_frames={resolved['min_frames']} exceeds max_frames={resolved['max_frames']}")
    return resolved


def _given(modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are set and concern `modality`, checked. Names that only clips know are no error for images."""
    own = options_for(modality, options)
    unknown = sorted(set(own) - set(_VIDEO))
    if unknown:
        raise RequestError(f"unknown processor option {', '.join(unknown)}; known are {', '.join(_VIDEO)}")
    names = _IMAGE if modality is Modality.IMAGE else _VIDEO
    given = {name: own[name] for name in names if own.get(name) is not None}
    for name, value in given.items():
        _check(name, value)
    return given


def _check(name: str, value: Any) -> None:
    if name in _INTEGERS:
        good, expected = type(value) is int and value > 0, "a positive integer"
    elif name in _FLAGS:
        good, expected = isinstance(value, bool), "true or false"
    elif name == "fps":
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        expected = "a positive number"
    else:
        edges = ("shortest_edge", "longest_edge")
        good = isinstance(value, Mapping) and set(value) == set(edges)
        good = good and all(type(value[edge]) is int and value[edge] > 0 for edge in edges)
        expected = "{'shortest_edge': pixels, 'longest_edge': pixels} with positive integers"
    if not good:
        raise RequestError(f"processor option {name} must be {expected}, got {value!r}")


def _limits(settings: PixelSettings, given: Mapping[str, Any]) -> dict[str, int]:
    size = given.get("size", {})
    least = given.get("min_pixels", size.get("shortest_edge", settings.min_pixels))
    most = given.get("max_pixels", size.get("longest_edge", settings.max_pixels))
    if least > most:
        raise RequestError(f"min_pixels={least} exceeds max_pixels={most}")
    return {"min_pixels": least, "max_pixels": most}
