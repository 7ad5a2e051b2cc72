# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories: whatever is missing, damaged or of another kind is named, all of it in one error."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from conversion_kit import ToyConfig, toy_family, toy_tensors, write_checkpoint

from conversion.checkpoint import describe
from conversion.loader import load_params
from mmjax.errors import CheckpointError

CFG = ToyConfig()


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path, toy_tensors(CFG), shards=3)


def test_a_complete_directory_is_described(sharded):
    (sharded / "chat_template.jinja").write_text("{{ messages }}")
    (sharded / "README.md").write_text("not a companion")
    checkpoint = describe(sharded)
    assert checkpoint.manifest is None
    assert [file.name for file in checkpoint.weight_files] == [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    assert {tensor.name for tensor in checkpoint.tensors()} == set(toy_tensors(CFG))
    names = [file.name for file in checkpoint.companions()]
    assert names == ["chat_template.jinja", "config.json", "preprocessor_config.json", "tokenizer.json"]


def test_everything_missing_is_named_at_once(sharded):
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json", "model-00002-of-00003.safetensors"):
        (sharded / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        describe(sharded)
    for name in ("config.json", "tokenizer.json", "vocab.json + merges.txt", "preprocessor_config.json", "model-00002"):
        assert name in str(caught.value)
    assert "model-00001" not in str(caught.value)


def test_only_wanted_parts_are_required(sharded):
    (sharded / "tokenizer.json").unlink()
    assert len(describe(sharded, parts=("weights", "processor")).weight_files) > 1


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("pytorch_model.bin", "save_pretrained"),
        ("model.gguf", "save_pretrained"),
        ("adapter_model.safetensors", "adapter"),
        ("params/x", "unfinished conversion"),
    ],
)
def test_weights_of_another_kind_get_a_hint(tmp_path, file, hint):
    write_checkpoint(tmp_path, toy_tensors(CFG))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=hint):
        describe(tmp_path)


def test_paths_that_are_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        describe(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        describe(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "not an object"),
        ("config.json", '{"quantization_config": {"quant_method": "awq"}}', r"quantised weights \(awq\)"),
        ("mmjax.json", '{"format_version": 99, "mmjax_version": "9.9"}', "format 99 by mmjax 9.9"),
        ("mmjax.json", '{"format_version": 1, "surprise": 0}', "not a manifest"),
    ],
)
def test_files_with_bad_content(sharded, name, content, message):
    (sharded / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        describe(sharded)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:20], "truncated"),
        (lambda data: b"", "not a safetensors file"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (lambda data: b"<html>404 not found</html>", "not a safetensors file"),
        (lambda data: (2).to_bytes(8, "little") + b"{]" + data[10:], "not JSON"),
        (lambda data: data.replace(b"[8,3,2,2]", b"[8,3,2,3]"), r"patch.weight is F32 \[8, 3, 2, 3\]"),
    ],
    ids=["tail", "header", "empty", "lfs", "html", "json", "shape"],
)
def test_damaged_weight_files(tmp_path, damage, message):
    write_checkpoint(tmp_path, toy_tensors(CFG))
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        load_params(tmp_path, toy_family(), CFG, progress=False)


def test_nothing_is_read_before_all_names_fit(tmp_path, monkeypatch):
    tensors = toy_tensors(CFG)
    del tensors["embed.weight"]
    write_checkpoint(tmp_path, tensors)
    monkeypatch.setattr("conversion.loader.read_bytes", lambda *_: pytest.fail("read a weight of a bad checkpoint"))
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        load_params(tmp_path, toy_family(), CFG, progress=False)


def test_a_file_that_ends_while_it_is_read(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, toy_tensors(CFG))
    checkpoint = describe(tmp_path)
    (tensor,) = [tensor for tensor in checkpoint.tensors() if tensor.name == "embed.weight"]
    os.truncate(tensor.file, tensor.offset + 4)
    from conversion.safetensors_file import read_bytes

    with pytest.raises(CheckpointError, match=r"ended while embed\.weight"):
        read_bytes(tensor, np.empty(tensor.shape, np.float32))


def test_single_file_wins_over_a_stale_index(tmp_path):
    write_checkpoint(tmp_path, toy_tensors(CFG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"embed.weight": "gone"}}))
    assert [file.name for file in describe(tmp_path).weight_files] == ["model.safetensors"]
