# SPDX-License-Identifier: Apache-2.0
"""Claim: deep models lower quickly, because each kind of layer is lowered once however often it is used."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.dispatch import reference_attention, vision_ops
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey
from mmjax.models.registry import family_for


@pytest.fixture(params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "hyperclovax", "lighton_ocr", "mistral3", "pixtral"])
def model(request, tiny_checkpoint):
    path: Path = tiny_checkpoint(request.param, layers=1, vision_depth=2).path
    hf = json.loads((path / "config.json").read_text())
    family = family_for(hf["model_type"])
    cfg = family.config(hf)
    deep = replace(cfg, text=replace(cfg.text, num_layers=12), vision=replace(cfg.vision, depth=12))
    return family, deep


def count(lowered: jax.stages.Lowered, name: str) -> int:
    """Functions whose name ends in `name`, numbered ones included."""
    return len(re.findall(rf"func.func private @\w*{name}(?:_\d+)?\(", lowered.as_text()))


def test_one_function_a_kind_of_layer(model):
    family, cfg = model
    spec = family.spec(cfg)
    bucket = EncoderBucket(EncoderGraphKey(32, 2), 4 if cfg.window_capacity else 0, 32 // cfg.merge)
    table = jax.ShapeDtypeStruct((3, 256), jnp.float32)
    inputs = family.vision_inputs(cfg, bucket)
    tower = jax.jit(family.encode, static_argnums=(1, 4)).lower(spec["vision"], cfg, inputs, table, vision_ops("cpu"))
    assert count(tower, "_block") == (2 if cfg.window_capacity else 1)  # windowed and full, or full only
    assert tower.out_info.shape == (bucket.rows, cfg.row_width)

    hidden = jax.ShapeDtypeStruct((5, 64), jnp.float32)
    positions = jax.ShapeDtypeStruct((cfg.position_axes, 5), jnp.int32)
    decoder = jax.jit(family.forward, static_argnums=(1, 6)).lower(
        spec["text"], cfg, hidden, positions, ((),) * 12, None, reference_attention()
    )
    assert count(decoder, "_layer") == 1
