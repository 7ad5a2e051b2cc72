# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of published sizes with random weights, written to disk as Hugging Face would."""

from __future__ import annotations

import json
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mmjax.bench.sizes import SIZES
from mmjax.demo import checkpoint_path
from mmjax.models.qwen2_5_vl import FAMILY

CONFIG_7B = SIZES["qwen2.5-vl-7b"] | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}  # few encoder buckets, so a short start
SHARD_VALUES = 1 << 30
_BLOCK = 1 << 26


def write_checkpoint(out: Path, seed: int = 0) -> Path:
    """Writes sharded bfloat16 weights (16.6 GB), config, and the demo's tokenizer and template into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for file in checkpoint_path().iterdir():
        if not file.name.startswith("model") and file.name != "config.json":
            shutil.copy(file, out / file.name)
    demo = json.loads((checkpoint_path() / "config.json").read_text())
    ids = {name: value for name, value in demo.items() if name.endswith("_token_id")}
    (out / "config.json").write_text(json.dumps(CONFIG_7B | ids))
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "size": PIXELS}
    (out / "preprocessor_config.json").write_text(json.dumps(settings))
    (out / "processor_config.json").unlink(missing_ok=True)
    (out / "video_preprocessor_config.json").unlink(missing_ok=True)
    _write_weights(out, FAMILY.config(CONFIG_7B | ids), np.random.default_rng(seed))
    return out


def _write_weights(out: Path, cfg, rng: np.random.Generator) -> None:
    block = rng.standard_normal(_BLOCK, dtype=np.float32)
    shards, values = [[]], 0
    for name, shape in stored_tensors(cfg):
        shards[-1].append((name, shape))
        values += int(np.prod(shape))
        if values > SHARD_VALUES:
            shards.append([])
            values = 0
    files = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda file, shard: _write_shard(out / file, shard, block), files, shards))
    index = {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_shard(file: Path, tensors: list, block: np.ndarray) -> None:
    made = {}
    for name, shape in tensors:
        size = int(np.prod(shape))
        is_norm = len(shape) == 1 and not name.endswith("bias")
        start = zlib.crc32(name.encode()) % (_BLOCK // 2)
        values = np.resize(block[start:], size) * np.float32(0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        made[name] = (values + np.float32(is_norm)).astype(ml_dtypes.bfloat16).reshape(shape)
    save_file(made, file, metadata={"format": "pt"})


def stored_tensors(cfg):
    """(name, shape) of every tensor that a checkpoint of this config holds."""
    for weight in FAMILY.weights(cfg):
        for layer in range(weight.stack or 1):
            for source, shape in zip(weight.sources, weight.source_shapes, strict=True):
                yield (source.format(i=layer) if weight.stack else source), shape
