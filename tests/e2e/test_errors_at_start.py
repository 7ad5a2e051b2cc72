# SPDX-License-Identifier: Apache-2.0
"""Claim: a checkpoint or a knob that can't work says so at once, by name and number."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import jax
import pytest
from llm_kit import CHECKPOINT, ENGINE

import mmjax
from mmjax.errors import CheckpointError, ConfigError
from mmjax.loading import compute_dtype
from mmjax.models.registry import FAMILIES

ON_CPU = jax.default_backend() == "cpu"


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path, tmp_path / "model")


def start(path, **options):
    return mmjax.LLM(path, **{"engine": ENGINE, "progress": False} | options)


def edit(path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        start(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        start(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(checkpoint, name):
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=name.split(".")[0]):
        start(checkpoint)


def test_files_that_are_cut_off(checkpoint):
    whole = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(whole[:40])
    with pytest.raises(CheckpointError, match=r"config\.json"):
        start(checkpoint)
    (checkpoint / "config.json").write_text(whole)
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        start(checkpoint)


def test_unknown_families_list_the_known(checkpoint):
    edit(checkpoint / "config.json", lambda config: config.update(model_type="llava_next"))
    with pytest.raises(CheckpointError, match="llava_next") as caught:
        start(checkpoint)
    names = [name for family in FAMILIES for name in family.model_types]
    assert len(names) >= 2
    assert all(name in str(caught.value) for name in names)


def test_weights_of_another_size(checkpoint):
    edit(checkpoint / "config.json", lambda config: config["text_config"].update(intermediate_size=96))
    with pytest.raises(CheckpointError, match=r"112.*96|96.*112"):
        start(checkpoint)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_dtypes_that_nobody_has(checkpoint, dtype):
    with pytest.raises(ConfigError, match=f"float32, bfloat16, got '{dtype}'"):
        start(checkpoint, dtype=dtype)


@pytest.mark.skipif(not ON_CPU, reason="a GPU has bfloat16")
def test_a_dtype_that_the_cpu_lacks(checkpoint):
    with pytest.raises(ConfigError, match="CPU computes in float32"):
        start(checkpoint, dtype="bfloat16")


def test_the_judge_knows_one_dtype(checkpoint):
    with pytest.raises(ConfigError, match=r"float32.*bfloat16"):
        start(checkpoint, dtype="bfloat16", reference=True)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"num_blocks": 4, "max_seq_len": 128, "tokens_per_block": 16}, r"4 KV pages.*64 tokens.*128"),
        ({"max_seq_len": 4096}, r"4096.*2048"),
        ({"max_num_tokens": 2, "max_batch_size": 4}, r"\(2\).*\(4\)|2.*4"),
    ],
)
def test_knobs_that_contradict_each_other(checkpoint, knobs, says):
    with pytest.raises(ConfigError, match=says):
        start(checkpoint, engine=mmjax.EngineConfig(**knobs))


def test_a_device_that_is_not_there(checkpoint):
    with pytest.raises(ConfigError, match="no device 'abacus' here"):
        start(checkpoint, device="abacus")


@pytest.mark.parametrize(
    ("platform", "capability", "dtype"),
    [("cpu", None, "float32"), ("gpu", "7.5", "float32"), ("gpu", "9.0", "bfloat16")],
)
def test_the_checkpoints_dtype_where_the_device_has_it(platform, capability, dtype):
    device = SimpleNamespace(platform=platform, compute_capability=capability, device_kind="a device")
    assert compute_dtype(None, "bfloat16", device) == dtype
    assert compute_dtype(None, "float32", device) == "float32"
    if dtype == "float32":
        with pytest.raises(ConfigError, match="bfloat16"):
            compute_dtype("bfloat16", "float32", device)


@pytest.mark.parametrize(
    ("config", "knobs", "says"),
    [
        (mmjax.EngineConfig, {"trace_steps": -1}, r"trace_steps.*-1"),
        (mmjax.EngineConfig, {"compile_threads": 0}, r"compile_threads.*0"),
        (mmjax.EngineConfig, {"kv_cache_free_gpu_memory_fraction": 1.5}, r"\(0, 1\].*1.5"),
        (mmjax.MultimodalConfig, {"media_threads": 0}, r"media_threads.*0"),
        (mmjax.MultimodalConfig, {"encoder_side_stream_max_ahead": -2}, r"max_ahead.*-2"),
        (mmjax.MultimodalConfig, {"encoder_cache_max_bytes": "many"}, r"encoder_cache_max_bytes.*'many'"),
        (mmjax.MultimodalConfig, {"encoder_output_max_bytes": -1}, r"encoder_output_max_bytes.*-1"),
        (mmjax.MultimodalConfig, {"encoder_buckets": []}, r"encoder_buckets.*\[\]"),
        (mmjax.MultimodalConfig, {"encoder_buckets": [(64, 65)]}, r"encoder_buckets.*64, 65"),
        (mmjax.MultimodalConfig, {"limit_mm_per_prompt": {"images": 4}}, r"limit_mm_per_prompt.*'images': 4"),
        (mmjax.MultimodalConfig, {"limit_mm_per_prompt": {"image": -1}}, r"limit_mm_per_prompt.*'image': -1"),
        (mmjax.MultimodalConfig, {"readiness": "soon"}, r"readiness.*'soon'"),
        (mmjax.MultimodalConfig, {"mm_encoder_only": True, "disable_mm_encoder": True}, "exclude each other"),
    ],
)
def test_knobs_are_checked_when_they_are_made(config, knobs, says):
    with pytest.raises(ConfigError, match=says):
        config(**knobs)
