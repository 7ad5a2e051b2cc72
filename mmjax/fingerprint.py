# SPDX-License-Identifier: Apache-2.0
"""A key for an executable from everything that decides it, without tracing: function, arguments, source, machine."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any

import jax
import numpy as np

# Packages whose release says what they do; of any other that a function comes from, the source does.
_RELEASES = ("jax", "jaxlib", "numpy", "flax")
_SOURCES = (".py", ".json")
# What compiles for a GPU has releases of its own.
_DEVICE_RELEASES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_OURS = ("mmjax", "kernels_pallas")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")  # compilers and their libraries read these


class UnstableError(Exception):
    """Something has no description that holds in another process."""


def fingerprint(device: jax.Device, *parts: Any) -> str:
    """Sha256 of `parts` and of all that decides besides how they are compiled for `device`.

    Covers the source of this package and of every package that a function or class among `parts` comes from, releases,
    and jax's settings in this thread. Raises UnstableError for lambdas, functions within functions and objects that
    are no plain data.
    """
    packages = set(_OURS)
    described = _describe([_surroundings(device), *parts], packages)
    sources = [f"{name} {_source(name)}" for name in sorted(packages)]
    return hashlib.sha256("\n".join([described, *sources]).encode()).hexdigest()


def _surroundings(device: jax.Device) -> dict[str, Any]:
    client = device.client
    where = [device.platform, device.device_kind, device.id, client.platform_version]
    if device.platform == "cpu":
        where.append(platform.node())  # code for this very processor, and a cache folder may be shared
    settings = {name: str(getattr(jax.config, name, value)) for name, value in sorted(jax.config.values.items())}
    settings = {name: value for name, value in settings.items() if "_cache" not in name}
    return {
        "python": sys.version,
        "releases": _releases(),
        "device": where,
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "settings": settings,
    }


@cache
def _releases() -> dict[str, str | None]:
    releases: dict[str, str | None] = dict.fromkeys((*_RELEASES, *_DEVICE_RELEASES))
    for name in releases:
        try:
            releases[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return releases


@cache
def _source(package: str) -> str:
    """Digest of every Python and JSON file of an imported top-level package, or of a module's one file."""
    module, digest = sys.modules[package], hashlib.sha256()
    if roots := getattr(module, "__path__", None):
        files = [(root, path) for root in roots for path in sorted(Path(root).rglob("*")) if path.suffix in _SOURCES]
    elif file := getattr(module, "__file__", None):
        files = [(Path(file).parent, Path(file))]
    else:
        raise UnstableError(f"{package} has no source")
    for root, path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _describe(value: Any, packages: set[str]) -> str:
    """Text that is equal for equal values in every process; packages that classes and functions come from are added."""
    nested = partial(_describe, packages=packages)
    match value:
        case None | bool() | int() | float() | str() | bytes() | np.dtype() if not isinstance(value, Enum):
            return f"{type(value).__name__} {value!r}"
        case Enum():
            return f"{_named(type(value), packages)}.{value.name}"
        case jax.ShapeDtypeStruct(sharding=None | jax.sharding.SingleDeviceSharding()):
            return f"{value!r} {value.weak_type}"
        case partial():
            return f"partial({nested([value.func, value.args, value.keywords])})"
        case MethodType():
            return f"{nested(value.__self__)}.{value.__name__}"
        case Mapping():
            parts = [f"{nested(key)}: {nested(item)}" for key, item in value.items()]
        case tuple() | list():
            parts = map(nested, value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            parts = [f"{field.name}={nested(getattr(value, field.name))}" for field in fields(value)]
        case _:
            return _named(value, packages)
    return f"{_named(type(value), packages)}({', '.join(parts)})"


def _named(value: Any, packages: set[str]) -> str:
    """The name of a function or class, if it leads to `value` and nothing else."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    try:
        found = attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError, TypeError):
        found = None
    if found is not value or value is None:
        raise UnstableError(f"{value!r} can't be found by name")
    package = module.partition(".")[0]
    if package not in _RELEASES and package not in sys.stdlib_module_names:
        packages.add(package)
    return f"{module}.{name}"
