# SPDX-License-Identifier: Apache-2.0
"""The JSON files in which checkpoints keep the settings of their processors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.images.resize import Filter

_FILTERS: dict[int, Filter] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


class SettingsFile:
    """A JSON object of a processor file; every error names the file and the key."""

    def __init__(self, name: str, values: Mapping[str, Any]):
        self.name = name
        self._values = values

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error to raise about `key`."""
        return CheckpointError(f"{self.name}: {key} {problem}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> SettingsFile:
        """The file with `defaults` for what is missing or null."""
        return SettingsFile(self.name, {**defaults, **{k: v for k, v in self._values.items() if v is not None}})

    def section(self, key: str) -> SettingsFile | None:
        """The object under `key`, None if there is none."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        return SettingsFile(f"{self.name}, {key}", value)

    def get(self, key: str, default: Any, valid: Callable[[Any], bool], expected: str) -> Any:
        """The value of `key`, `default` if it is missing or null; CheckpointError unless it is `valid`."""
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

    def filter(self) -> Filter:
        """The resampling filter; bicubic by default, as all processors here."""
        number = self.get("resample", 3, _FILTERS.__contains__, "2 (bilinear) or 3 (bicubic)")
        return _FILTERS[number]

    def require_side(self, key: str, side: int) -> None:
        """Refuses a side that differs from what config.json says of the tower."""
        if self.positive(key, side) != side:
            raise self.error(key, f"is {self._values[key]}, but config.json says {side}")

    def require_resize(self) -> None:
        """Refuses processors that take pictures as they are."""
        if not self.flag("do_resize", True):
            raise self.error("do_resize", "is false; pictures of any size need it")


def load_settings(path: Path) -> SettingsFile | None:
    """The file at `path`, None if there is none. Raises CheckpointError if it is no JSON object."""
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: can't be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name}: must be a JSON object")
    return SettingsFile(path.name, values)


def first_of(*files: SettingsFile | None) -> SettingsFile:
    """The first of `files` that exists, else an empty one."""
    return next((file for file in files if file is not None), SettingsFile("processor defaults", {}))


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
