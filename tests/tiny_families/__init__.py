# SPDX-License-Identifier: Apache-2.0
"""Builders of tiny checkpoints, one module a family or group of families; the two oldest are in `tiny`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

# The module of each family. Each has `build(family, path, **options) -> TinyCheckpoint`; options as in `tiny.build`.
MODULES = {
    "qwen2_vl": "tiny",
    "qwen2_5_vl": "tiny",
    "qwen3_vl": "tiny_families.qwen3_vl",
    "qwen3_vl_moe": "tiny_families.qwen3_vl_moe",
    "hyperclovax": "tiny_families.hyperclovax",
    "deepseek_v4_1": "tiny_families.deepseek_v4_1",
    "lighton_ocr": "tiny_families.lighton_ocr",
    "mistral3": "tiny_families.mistral",
    "pixtral": "tiny_families.mistral",
}


def build(family: str, path: Path, **options: Any) -> Any:
    """Makes and saves a tiny model of `family` with its processor."""
    return import_module(MODULES[family]).build(family, path, **options)
