# SPDX-License-Identifier: Apache-2.0
"""Converted checkpoints: a Hugging Face directory as an orbax checkpoint with its companion files beside it."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import mmjax
from conversion.checkpoint import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    PARAMS_DIR,
    Checkpoint,
    Manifest,
    describe,
    write_json,
)
from conversion.dtypes import compute_dtype
from conversion.layout import dotted
from conversion.loader import load_hf
from conversion.matching import raise_if_any
from mmjax.errors import CheckpointError
from mmjax.models.family import Family, ModelConfig


def convert(hf_dir: str | Path, out: str | Path, dtype: str | None = None, *, progress: bool = True) -> Path:
    """Writes a Hugging Face checkpoint as an orbax one: weights fused and padded, companion files copied.

    The weights pass through host memory, which must hold the whole model once.

    Args:
      out: a directory that does not exist yet or is empty.
      dtype: "float32" or "bfloat16"; the checkpoint's own if None.

    Returns:
      `out`. Its mmjax.json is written last, so a directory with one is complete.

    Raises:
      CheckpointError: an incomplete source, an unknown family, a source that is converted already, or an `out` in use.
      ConfigError: a dtype that is neither float32 nor bfloat16.
    """
    source, out = describe(hf_dir), Path(out)
    if source.manifest is not None:
        raise CheckpointError(f"{source.path} is a converted checkpoint already")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty directory")
    family = source.family()
    cfg = family.config(source.config)
    if dtype is not None:
        compute_dtype(dtype)
        cfg = dataclasses.replace(cfg, dtype=dtype)
    host = jax.devices("cpu")[0]
    params = load_hf(source, family, cfg, put=lambda leaf: jax.device_put(leaf, host), progress=progress)
    save_converted(params, source, out, family=family, dtype=cfg.dtype)
    return out


def save_converted(params: dict, source: Checkpoint, out: Path, *, family: Family, dtype: str) -> None:
    """Writes `params`, the companion files of `source` and the manifest, in this order."""
    out.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((out / PARAMS_DIR).absolute(), params)
    for file in source.companions():
        shutil.copyfile(file, out / file.name)
    config = {**source.config, "dtype": dtype}
    config.pop("torch_dtype", None)  # the older name of the same field
    write_json(out / "config.json", config)
    manifest = Manifest(FORMAT_VERSION, family.name, dtype, mmjax.__version__)
    write_json(out / MANIFEST_FILE, dataclasses.asdict(manifest))


def load_converted(checkpoint: Checkpoint, family: Family, cfg: ModelConfig, *, device: jax.Device) -> dict:
    """Restores a converted checkpoint straight onto `device`, cast to the dtypes of `family.spec(cfg)`.

    Raises:
      CheckpointError: another family's checkpoint, or leaves that are missing, unexpected or misshaped.
    """
    if checkpoint.manifest is not None and checkpoint.manifest.family != family.name:
        raise CheckpointError(
            f"{checkpoint.path} was converted as {checkpoint.manifest.family}, its config.json says {family.name}"
        )
    return load_orbax(checkpoint.path, family.spec(cfg), device=device, family_name=family.name)


def load_orbax(path: str | Path, spec: Any, *, device: jax.Device, family_name: str = "mmjax") -> Any:
    """The tree `spec` of a converted directory, each leaf on `device` with the spec's shape and dtype."""
    path = Path(path)
    sharding = jax.sharding.SingleDeviceSharding(device)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), spec)
    largest = max(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(spec))
    # Orbax counts both ends of a cast, and refuses a leaf larger than its limit.
    with ocp.StandardCheckpointer(restore_concurrent_gb=1 + math.ceil(3 * largest / 1e9)) as checkpointer:
        _check_leaves(path, checkpointer, spec, family_name)
        return checkpointer.restore((path / PARAMS_DIR).absolute(), target)


def _check_leaves(path: Path, checkpointer: ocp.StandardCheckpointer, spec: Any, family_name: str) -> None:
    tree = checkpointer.metadata((path / PARAMS_DIR).absolute()).item_metadata.tree
    stored = {dotted(key): tuple(leaf.shape) for key, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    wanted = {dotted(key): tuple(leaf.shape) for key, leaf in jax.tree_util.tree_flatten_with_path(spec)[0]}
    misshaped = [
        f"{name}: {list(stored[name])}, config.json implies {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    groups = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name in stored if name not in wanted],
        "misshaped": misshaped,
    }
    raise_if_any(path, family_name, groups)
