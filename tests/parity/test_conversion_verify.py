# SPDX-License-Identifier: Apache-2.0
"""Verification: agrees with transformers on every stage, and names the first stage where something was changed."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conversion.orbax_io import convert
from conversion.verify import Report, StageResult, render, verify
from conversion.verify.prompt import fixed_prompt
from conversion.verify.stages import compare, compare_arrays, compare_greedy
from mmjax.config import EngineConfig
from mmjax.errors import CheckpointError, ConfigError
from mmjax.outputs import RequestOutput, TokenLogprobs

TOKENS = 6


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "hyperclovax"])
def test_a_sound_checkpoint_passes_in_both_layouts(tiny_checkpoint, tmp_path, family):
    path = tiny_checkpoint(family, layers=3, vision_depth=2).path
    converted = convert(path, tmp_path / "converted", progress=False)
    for directory in (path, converted):
        report = verify(directory, new_tokens=TOKENS, progress=False)
        assert report.passed, render(report)
        assert report.first_difference is None
        stages = [result.stage for result in report.results]
        assert stages == [
            "token ids",
            "positions",
            "pixels",
            "tower rows",
            "fused embeddings",
            *(f"text layer {i}" for i in range(3)),
            "logits",
            "greedy tokens",
        ]
        assert all(result.error == 0 for result in report.results[:3])


@pytest.fixture(scope="module")
def own(tiny_checkpoint):
    """A small checkpoint, and what mmjax computes on a directory."""
    from conversion.verify.own_stages import own_stages

    path = tiny_checkpoint("qwen2_vl", layers=2, vision_depth=1).path

    def run(directory):
        return own_stages(directory, fixed_prompt(), np.arange(2), device=jax.devices()[0], progress=False)

    return path, run, run(path)


@pytest.mark.parametrize(
    ("changed", "stage"),
    [
        ("model.layers.1.mlp.down_proj.weight", "text layer 1"),
        ("model.embed_tokens.weight", "fused embeddings"),
        ("visual.merger.mlp.2.bias", "tower rows"),
        ("lm_head.weight", "logits"),
    ],
)
def test_the_first_stage_that_differs_is_named(own, tmp_path, changed, stage):
    original, run, sound = own
    path = shutil.copytree(original, tmp_path / "changed")
    tensors = load_file(path / "model.safetensors")
    tensors[changed] = tensors[changed] + 0.01
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    report = Report("", compare(run(path), sound))
    assert report.first_difference == stage
    assert f"the first stage that differs: {stage}" in render(report)


def test_wrong_values_never_pass():
    good = np.ones((2, 3), np.float32)
    assert compare_arrays("logits", good, good).passed
    assert not compare_arrays("logits", good * np.nan, good).passed
    assert not compare_arrays("logits", good, good * np.nan).passed
    shape = compare_arrays("logits", good[:1], good)
    assert not shape.passed
    assert "[1, 3], expected [2, 3]" in shape.note
    off_by_one_ulp = np.nextafter(good, 2)
    assert compare_arrays("logits", off_by_one_ulp, good).passed
    assert not compare_arrays("pixels", off_by_one_ulp, good).passed


def test_tolerance_grows_with_large_values():
    large = np.full(3, 5000.0, np.float32)
    assert compare_arrays("text layer 3", large + 0.04, large).passed
    assert not compare_arrays("text layer 3", large + 0.06, large).passed


def test_greedy_tokens_may_differ_where_the_judge_is_undecided():
    judge, margins = np.array([5, 6, 7]), np.array([1.0, 1e-5, 1.0])
    assert compare_greedy(np.array([5, 9, 7]), judge, margins).passed
    assert compare_greedy(np.array([5, 9, 7]), judge, margins).note == "2 of 3 equal, 1 tied"
    assert not compare_greedy(np.array([4, 6, 7]), judge, margins).passed
    assert not compare_greedy(np.array([5, 6]), judge, margins).passed


def test_the_table_aligns():
    results = (StageResult("pixels", 0.0, 0.0), StageResult("text layer 10", 2.5e-3, 1e-4, "remark"))
    lines = render(Report("title", results)).splitlines()
    assert lines[0] == "title"
    assert lines[3].startswith("pixels ")
    assert lines[3].endswith(" ok")
    assert lines[4].split() == ["text", "layer", "10", "0.0025", "0.0001", "DIFFERS", "remark"]
    assert lines[-1] == "the first stage that differs: text layer 10"


def test_the_prompt_is_the_same_everywhere():
    first, second = fixed_prompt(), fixed_prompt()
    assert np.array_equal(first.image, second.image)
    assert first.image.dtype == np.uint8
    assert int(first.image.astype(np.int64).sum()) == 24_800_985


def test_unknown_judges_and_incomplete_checkpoints(tiny_checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="judges are transformers and reference"):
        verify(tiny_checkpoint("qwen2_vl").path, against="nobody")
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "nowhere")


def _output(tokens: list[int], logprobs: list[float], second: float = -3.0) -> RequestOutput:
    steps = [TokenLogprobs(t, p, {t: p, 99: second}) for t, p in zip(tokens, logprobs, strict=True)]
    return RequestOutput("r", "", tokens, [1], "length", steps)


def test_engine_answers_are_compared_up_to_the_first_tie():
    from conversion.verify.engine_stages import compare_answers

    judge = _output([5, 6, 7], [-1.0, -1.0, -1.0])
    assert all(result.passed for result in compare_answers(judge, judge))
    logprobs, tokens = compare_answers(_output([5, 8, 9], [-1.1, -2.0, -2.0]), judge)
    assert not tokens.passed
    assert logprobs.error == pytest.approx(0.1)
    tie = _output([5, 6, 7], [-1.0, -1.0, -1.0], second=-1.00001)
    logprobs, tokens = compare_answers(_output([5, 8, 9], [-1.0, -1.0, -2.0]), tie)
    assert tokens.passed
    assert tokens.note == "1 of 2 equal, 1 tied"
    assert logprobs.error == 0


def test_the_engine_passes_against_the_reference(tiny_checkpoint):
    path = tiny_checkpoint("qwen2_vl", layers=1, vision_depth=1).path
    engine = EngineConfig(max_batch_size=1, max_num_tokens=64, max_seq_len=256)  # the prompt needs two chunks
    report = verify(path, "reference", engine=engine, new_tokens=TOKENS, progress=False)
    assert report.passed, render(report)
    assert [result.stage for result in report.results] == ["token ids", "tower rows", "token logprobs", "greedy tokens"]
