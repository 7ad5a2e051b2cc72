# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory for a published size, without weights, for engines that read their config from files."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mmjax.bench.sizes import PROCESSORS, SIZES
from mmjax.demo import checkpoint_path

if TYPE_CHECKING:
    from mmjax.bench.subject import Subject

_ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}


@contextmanager
def checkpoint_folder(subject: Subject) -> Iterator[Path]:
    """The subject's own directory; for random weights a temporary one with all but the weights."""
    if not subject.random:
        yield subject.model.path
        return
    with tempfile.TemporaryDirectory(prefix="mmjax-bench-") as name:
        write_published(subject.name, Path(name))
        yield Path(name)


def write_published(size: str, folder: Path) -> None:
    """Config and processor settings of the size; tokenizer, template and token ids of the demo."""
    demo, config = checkpoint_path(), SIZES[size]
    family, vision = config["model_type"], config["vision_config"]
    ids = {key: value for key, value in _read(demo / "config.json").items() if key.endswith("_token_id")}
    _write(folder / "config.json", config | ids | {"architectures": [_ARCHITECTURES[family]]})
    patches = {key: vision[key] for key in ("patch_size", "temporal_patch_size")}
    patches["merge_size"] = vision["spatial_merge_size"]
    image = PROCESSORS[family] | patches | {"image_processor_type": "Qwen2VLImageProcessor"}
    _write(folder / "preprocessor_config.json", image)
    tokenizer = _read(demo / "tokenizer_config.json")
    tokenizer.pop("processor_class")
    _write(folder / "tokenizer_config.json", tokenizer)
    for file in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(demo / file, folder)


def _read(path: Path) -> dict:
    return json.loads(path.read_text())


def _write(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values))
