# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint's config.json: every error names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.errors import CheckpointError

_MISSING = object()


class ConfigSection:
    """One object of config.json; `path` is where it hangs ("" for the top level)."""

    def __init__(self, values: Mapping[str, Any], path: str = ""):
        self._values = values
        self._path = path

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"config.json: {self.name(key)} {problem}")

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def names(self) -> tuple[str, ...]:
        """Every key that is set."""
        return tuple(key for key in self._values if key in self)

    def value(self, key: str) -> Any:
        """The value of `key` as it stands, None if it is not set."""
        return self._values.get(key)

    def section(self, key: str) -> ConfigSection:
        value = self._read(key, _MISSING)
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        return ConfigSection(value, self.name(key))

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigSection:
        """The same section with `defaults` for absent keys; a null stays one."""
        return ConfigSection({**defaults, **self._values}, self._path)

    def integer(self, key: str, default: Any = _MISSING) -> int:
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, got {value!r}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, got {value!r}")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._read(key, _MISSING)
        if not isinstance(value, list | tuple) or not all(type(v) is int for v in value):
            raise self.error(key, f"must be a list of integers, got {value!r}")
        return tuple(value)

    def choices(self, key: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """A list of the allowed words; empty where the key is absent."""
        value = self._read(key, ())
        if not isinstance(value, list | tuple) or not all(v in allowed for v in value):
            raise self.error(key, f"must be a list of {', '.join(allowed)}; got {value!r}")
        return tuple(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._read(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: Any = _MISSING) -> str:
        value = self._read(key, default)
        if value not in allowed:
            raise self.error(key, f"must be one of {', '.join(allowed)}; got {value!r}")
        return value

    def _read(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.error(key, "is missing")
        return default


def compute_dtype(top: ConfigSection, text: ConfigSection) -> str:
    """The dtype to compute in. float16 weights are widened to float32, which holds them exactly."""
    known = ("float32", "bfloat16", "float16")
    for section in (top, text):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                dtype = section.choice(key, known)
                return "float32" if dtype == "float16" else dtype
    return "float32"


def padded_mlp_width(width: int) -> int:
    """MLP width after padding with zeros at load time: a multiple of 64, from 512 on.

    Matrix units run odd widths slowly (3420 -> 3456 makes a vision tower a quarter faster); results do not change.
    """
    return width if width < 512 else -(-width // 64) * 64
