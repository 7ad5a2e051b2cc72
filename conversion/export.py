# SPDX-License-Identifier: Apache-2.0
"""Our parameters as a Hugging Face directory: the weight table applied backwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from conversion.checkpoint import INDEX_FILE, SINGLE_FILE, write_json
from conversion.dtypes import compute_dtype
from conversion.layout import Leaf, leaves
from mmjax.errors import CheckpointError
from mmjax.models.family import Family, ModelConfig

SHARD_BYTES = 4 << 30


def export(
    params: dict,
    family: Family,
    cfg: ModelConfig,
    out: str | Path,
    *,
    config: Mapping[str, Any],
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes `params` as safetensors files under the names of transformers, and `config` as config.json.

    Host memory holds one shard. A tied head is not written; transformers ties it again. The tokenizer and processor
    files of `out`, if any, are left alone.

    Args:
      config: the content of config.json; "dtype" is set to what is written.
      dtype: "float32" or "bfloat16"; `cfg.dtype` if None.
      shard_bytes: size above which the weights go into several files with an index.

    Raises:
      CheckpointError: a leaf whose padding is not zero, which a checkpoint without padding could not express.
      ConfigError: a dtype that is neither float32 nor bfloat16.
    """
    out = Path(out)
    name = dtype or cfg.dtype
    compute_dtype(name)
    plan = leaves(family.weights(cfg), family.spec(replace(cfg, dtype=name)))
    shards = _shards(plan, shard_bytes)
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("model*.safetensors"), *out.glob(INDEX_FILE)):
        stale.unlink()  # a single file left beside new shards would win over them
    arrays = dict(zip((leaf.path for leaf in plan), jax.tree.leaves(params), strict=True))
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {key: value for leaf in shard for key, value in _split(leaf, arrays[leaf.path])}
        save_file(tensors, out / file, metadata={"format": "pt"})  # transformers refuses files without it
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(map(_stored_bytes, plan))
        write_json(out / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    written = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": name}
    write_json(out / "config.json", written)
    return out


def _split(leaf: Leaf, array: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint tensors of a leaf: split, unstacked, unpadded, reshaped and cast."""
    values = np.asarray(array)
    if leaf.padded:
        padding = np.ones(leaf.shape, bool)
        for piece in leaf.pieces:
            piece.of(padding)[...] = False
        if np.any(values[padding]):
            raise CheckpointError(f"{leaf.path}: its padding holds values other than zero, which export would drop")
    for piece in leaf.pieces:
        yield piece.name, np.ascontiguousarray(piece.of(values), dtype=_stored_dtype(leaf)).reshape(piece.shape)


def _shards(plan: list[Leaf], limit: int) -> list[list[Leaf]]:
    """Leaves in order, in groups of at most `limit` bytes; a larger leaf is a group of its own."""
    groups: list[list[Leaf]] = [[]]
    size = 0
    for leaf in plan:
        nbytes = _stored_bytes(leaf)
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += nbytes
    return groups


def _stored_bytes(leaf: Leaf) -> int:
    return sum(int(np.prod(piece.shape)) for piece in leaf.pieces) * _stored_dtype(leaf).itemsize


def _stored_dtype(leaf: Leaf) -> np.dtype:
    """The leaf's own, but tables of integers are stored as torch has them."""
    return np.dtype(np.int64) if np.issubdtype(leaf.dtype, np.integer) else leaf.dtype
