# SPDX-License-Identifier: Apache-2.0
"""Hugging Face to orbax and back: bit for bit the same parameters on every way."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from conversion_kit import QWEN2_5_VL, QWEN2_VL, ToyConfig, toy_family, toy_tensors, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from conversion.checkpoint import describe
from conversion.export import export
from conversion.loader import load_params
from conversion.orbax_io import convert, load_orbax
from mmjax.errors import CheckpointError, ConfigError
from mmjax.models.random_params import random_params
from mmjax.models.registry import family_for


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.fixture(params=[QWEN2_VL, QWEN2_5_VL], ids=lambda config: config["model_type"])
def model(request, tmp_path):
    """A float32 Hugging Face directory with random weights, its family and its config."""
    family = family_for(request.param["model_type"])
    cfg = family.config(request.param)
    path = export(random_params(family.spec(cfg), 0), family, cfg, tmp_path / "hf", config=request.param)
    for name in ("tokenizer.json", "preprocessor_config.json", "chat_template.jinja"):
        (path / name).write_text(name)
    return path, family, cfg


def test_orbax_gives_what_the_original_gives(model, tmp_path):
    path, family, cfg = model
    out = convert(path, tmp_path / "out", progress=False)
    device = jax.devices()[0]
    for dtype in ("float32", "bfloat16"):
        wanted = dataclasses.replace(cfg, dtype=dtype)
        direct = load_params(path, family, wanted, progress=False)
        restored = load_params(out, family, wanted, device=device, progress=False)
        assert_same_bits(restored, direct)
        assert all(x.committed and x.devices() == {device} for x in jax.tree.leaves(restored))
        assert_same_bits(load_orbax(out, family.spec(wanted), device=device), direct)


def test_converted_directory_is_complete(model, tmp_path):
    path, family, _ = model
    out = convert(path, tmp_path / "out", "bfloat16", progress=False)
    checkpoint = describe(out)
    assert checkpoint.manifest.family == family.name
    assert checkpoint.manifest.dtype == checkpoint.config["dtype"] == "bfloat16"
    assert family.config(checkpoint.config).dtype == "bfloat16"
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert (out / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert not list(out.glob("*.safetensors"))


def test_bfloat16_conversion_rounds_as_loading_does(model, tmp_path):
    path, family, cfg = model
    half = dataclasses.replace(cfg, dtype="bfloat16")
    out = convert(path, tmp_path / "out", "bfloat16", progress=False)
    assert_same_bits(load_params(out, family, half, progress=False), load_params(path, family, half, progress=False))


def test_convert_refuses(model, tmp_path):
    path, family, cfg = model
    out = convert(path, tmp_path / "out", progress=False)
    with pytest.raises(CheckpointError, match="already"):
        convert(out, tmp_path / "again")
    with pytest.raises(CheckpointError, match="not an empty directory"):
        convert(path, out)
    with pytest.raises(ConfigError, match="float16"):
        convert(path, tmp_path / "half", "float16")
    wider = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, intermediate_size=128, num_layers=4))
    with pytest.raises(CheckpointError) as caught:
        load_params(out, family, wider, progress=False)
    assert "text.layers.3.qkv" in str(caught.value)
    assert "misshaped" in str(caught.value)
    manifest = json.loads((out / "mmjax.json").read_text())
    (out / "mmjax.json").write_text(json.dumps(manifest | {"family": "other"}))
    with pytest.raises(CheckpointError, match="converted as other"):
        load_params(out, family, cfg, progress=False)


@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(1, 3),
    mlp=st.integers(1, 5),
    extra=st.integers(0, 3),
    tied=st.booleans(),
    shard_bytes=st.sampled_from([1, 300, 1 << 30]),
)
def test_export_inverts_loading(tmp_path_factory, layers, mlp, extra, tied, shard_bytes):
    cfg = ToyConfig(layers=layers, mlp=mlp, padded_mlp=mlp + extra, tied=tied)
    family, tensors, base = toy_family(), toy_tensors(cfg), tmp_path_factory.mktemp("export")
    params = load_params(write_checkpoint(base / "in", tensors), family, cfg, progress=False)
    out = export(params, family, cfg, base / "out", config={"model_type": "toy"}, shard_bytes=shard_bytes)
    stored = {}
    for file in describe(out, parts=("weights",)).weight_files:
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            stored |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert stored.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(stored[name], value)


def test_export_replaces_older_weights(tmp_path):
    cfg, family = ToyConfig(), toy_family()
    write_checkpoint(tmp_path, toy_tensors(cfg, seed=1))
    params = load_params(tmp_path, family, cfg, progress=False)
    changed = jax.tree.map(lambda x: x * 2, params)
    export(changed, family, cfg, tmp_path, config={"model_type": "toy"}, shard_bytes=300)
    assert_same_bits(load_params(tmp_path, family, cfg, progress=False), changed)
    assert (tmp_path / "tokenizer.json").exists()


def test_export_refuses_padding_that_is_not_zero(tmp_path):
    cfg, family = ToyConfig(), toy_family()
    params = load_params(write_checkpoint(tmp_path / "in", toy_tensors(cfg)), family, cfg, progress=False)
    params["text"]["layers"][1]["down"] += 1
    with pytest.raises(CheckpointError, match=r"text\.layers\.1\.down: its padding"):
        export(params, family, cfg, tmp_path / "out", config={})


@pytest.mark.parametrize(
    ("name", "tie"), [("qwen2_vl", False), ("qwen2_5_vl", True), ("hyperclovax", False), ("hyperclovax", True)]
)
def test_transformers_loads_what_export_writes(tiny_checkpoint, tmp_path, name, tie):
    """Every parameter comes back bit for bit, from matrices that were padded (544 is no multiple of 64)."""
    transformers = pytest.importorskip("transformers")
    checkpoint = tiny_checkpoint(name, layers=1, vision_depth=1, mlp=544, vision_mlp=544, tie=tie)
    described = describe(checkpoint.path)
    family = described.family()
    cfg = family.config(described.config)
    assert ("lm_head" in family.spec(cfg)["text"]) != tie
    params = load_params(checkpoint.path, family, cfg, progress=False)
    out = export(params, family, cfg, tmp_path, config=described.config, shard_bytes=500_000)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(out, local_files_only=True).state_dict()
    original = checkpoint.model.state_dict()
    assert loaded.keys() == original.keys()
    for key, value in original.items():
        np.testing.assert_array_equal(loaded[key].numpy(), value.numpy(), err_msg=key)
