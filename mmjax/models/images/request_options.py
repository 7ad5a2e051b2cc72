# SPDX-License-Identifier: Apache-2.0
"""Processor options of a request: flat, or nested by modality as transformers' processors take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.errors import RequestError
from mmjax.inputs.items import Modality

NESTED_NAMES = {Modality.IMAGE: "images_kwargs", Modality.VIDEO: "videos_kwargs"}


def options_for(modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
    """The flat options, and over them those nested under the modality's name.

    Raises RequestError if that name holds anything but a mapping.
    """
    flat = {name: value for name, value in options.items() if name not in NESTED_NAMES.values()}
    name = NESTED_NAMES[modality]
    nested = options.get(name)
    if not isinstance(nested, Mapping | None):
        raise RequestError(f"processor option {name} must be a mapping of options, got {nested!r}")
    return flat | dict(nested or {})
