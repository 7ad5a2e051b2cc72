# SPDX-License-Identifier: Apache-2.0
"""Claim: `mmjax bench` counts floors as one would by hand, compiles what it measures, and says what it found."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import llm_kit
import numpy as np
import pytest

from mmjax.bench import between_tokens, serving, startup
from mmjax.bench.floors import Ceilings, Work, decode_work, encoder_work, prefill_work
from mmjax.bench.report import Figure, render
from mmjax.bench.sizes import SIZES
from mmjax.bench.subject import Subject
from mmjax.cli import main
from mmjax.models.images.packing import window_order

# Qwen2.5-VL-7B: values of one decoder layer's matrices (28 layers), of the head, bytes of one token's KV in bfloat16.
LAYER = 3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944
HEAD = 152064 * 3584
KV_BYTES = 2 * 28 * 4 * 128 * 2
# Values of the tower's matrices that every patch meets: embedding, then 32 blocks of attention and MLP; of the merger.
PATCH = 3 * 2 * 14 * 14 * 1280 + 32 * (4 * 1280 * 1280 + 3 * 1280 * 3420)
MERGER = 5120 * 5120 + 5120 * 3584


@pytest.fixture(scope="module")
def seven():
    """Family, bfloat16 config and processor of the 7B size."""
    model = Subject("qwen2.5-vl-7b", None).model
    return model.family, replace(model.cfg, dtype="bfloat16"), model.processor


def test_a_picture_through_the_7b_tower(seven):
    family, cfg, processor = seven
    plan = processor.plan_image(1008, 1008, {})
    assert (plan.grid, plan.rows, plan.windows) == ((1, 72, 72), 1296, 81)
    attention = 4 * 1280 * (4 * 5184**2 + 28 * 81 * 64**2)
    work = encoder_work(family, cfg, [plan])
    assert work.operations == 2 * 5184 * PATCH + 2 * 1296 * MERGER + attention
    assert work.operations == pytest.approx(7.25e12, rel=0.003)
    assert work.bytes == 2 * (PATCH + MERGER + 1296 * 3584) + 5184 * 1176
    assert encoder_work(family, cfg, [plan] * 16).operations == 16 * work.operations


def test_a_picture_through_the_8b_tower_of_qwen3_vl():
    """Every patch meets 27 blocks, every row the merger and three more for the deepstack levels."""
    model = Subject("qwen3-vl-8b", None).model
    cfg = replace(model.cfg, dtype="bfloat16")
    plan = model.processor.plan_image(1024, 1024, {})
    assert (plan.grid, plan.rows) == ((1, 64, 64), 1024)
    patch = 3 * 2 * 16 * 16 * 1152 + 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304)
    mergers = 4 * (4608 * 4608 + 4608 * 4096)
    work = encoder_work(model.family, cfg, [plan])
    assert work.operations == 2 * 4096 * patch + 2 * 1024 * mergers + 4 * 1152 * 27 * 4096**2
    assert work.bytes == 2 * (patch + mergers + 1024 * 4 * 4096) + 4096 * 1536
    # 8.2 billion values of text, of which every token meets all but the embedding.
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    assert decode_work(model.family, cfg, 1, 1).operations == pytest.approx(2 * (36 * layer + 151936 * 4096), rel=1e-4)
    assert 36 * layer + 2 * 151936 * 4096 == pytest.approx(8.19e9, rel=1e-3)


@pytest.mark.parametrize(("height", "width"), [(56, 56), (280, 140), (308, 1036), (84, 2800)])
def test_windows_on_the_edges_count_as_cut(seven, height, width):
    family, cfg, processor = seven
    plan = processor.plan_image(height, width, {})
    _, rows, columns = plan.grid
    _, sizes = window_order(rows, columns, 2, 4)
    pairs = 4 * (rows * columns) ** 2 + 28 * int((sizes**2).sum())
    expected = 2 * rows * columns * PATCH + 2 * plan.rows * MERGER + 4 * 1280 * pairs
    assert encoder_work(family, cfg, [plan]).operations == expected


def test_decode_reads_the_weights_once_and_every_context(seven):
    family, cfg, _ = seven
    weights = 2 * (28 * LAYER + HEAD)
    assert weights == pytest.approx(14.1e9, rel=0.003)
    one, many = decode_work(family, cfg, 1, 1024), decode_work(family, cfg, 256, 1024)
    assert one.bytes == weights + 1024 * KV_BYTES
    assert many.bytes == weights + 256 * 1024 * KV_BYTES
    assert one.operations == 2 * (28 * LAYER + HEAD) + 4 * 28 * 28 * 128 * 1024
    assert many.operations == 256 * one.operations


def test_prefill_counts_causal_pairs_and_the_prefix(seven):
    family, cfg, _ = seven
    work = prefill_work(family, cfg, [(0, 1024)] * 16)
    pairs = 16 * 1024 * 1025 // 2
    assert work.operations == 2 * (16384 * 28 * LAYER + 16 * HEAD) + 4 * 28 * 28 * 128 * pairs
    # The published measurement counts 345 ms as 630 TFLOP/s.
    assert work.operations == pytest.approx(0.345 * 630e12, rel=0.01)
    whole, rest = (prefill_work(family, cfg, [chunk]).operations for chunk in ((0, 100), (60, 40)))
    first = prefill_work(family, cfg, [(0, 60)]).operations
    assert whole == first + rest - 2 * HEAD


def test_a_mixture_multiplies_with_its_choice_and_reads_what_anybody_chose():
    """Qwen3-VL-30B-A3B: 48 layers of 128 experts, 8 to a token."""
    model = Subject("qwen3-vl-30b-a3b", None).model
    family, cfg = model.family, replace(model.cfg, dtype="bfloat16")
    expert = 3 * 2048 * 768
    others = 48 * (2048 * (4096 + 2 * 512) + 4096 * 2048 + 128 * 2048) + 151936 * 2048
    kv = 2 * 48 * 4 * 128
    attention = 4 * 48 * 32 * 128 * 1024
    one = decode_work(family, cfg, 1, 1024)
    assert one.operations == pytest.approx(2 * (others + 48 * 8 * expert) + attention)
    assert one.bytes == pytest.approx(2 * (others + 48 * 8 * expert + 1024 * kv))
    sixteen = decode_work(family, cfg, 16, 1024)
    assert sixteen.operations == pytest.approx(16 * one.operations)
    expected = 128 * (1 - (1 - 8 / 128) ** 16)  # 82.4 of 128 experts
    assert sixteen.bytes == pytest.approx(2 * (others + 48 * expected * expert + 16 * 1024 * kv))
    prompt = prefill_work(family, cfg, [(0, 4096)])
    everything = others + 48 * 128 * expert
    assert everything == pytest.approx(30.2e9, rel=0.01)
    assert prompt.bytes == pytest.approx(2 * (everything + 4096 * kv))


def test_a_floor_is_the_slower_of_arithmetic_and_memory_for_each_work():
    ceilings = Ceilings(matmul=100.0, copy=10.0)
    assert ceilings.seconds(Work(200, 10)) == 2
    assert ceilings.seconds(Work(200, 50)) == 5
    assert ceilings.seconds(Work(200, 10), Work(200, 50)) == 7


def test_a_figure_is_a_median_with_quartiles_and_a_ratio():
    figure = Figure("x", [0.004, 0.001, 0.002, 0.003, 0.010], floor=0.002)
    assert (figure.median, figure.ratio) == (0.003, 1.5)
    assert figure.spread == pytest.approx((0.002, 0.004))
    assert render([figure]).splitlines()[1].split() == ["x", "3", "2", "to", "4", "2", "1.50"]


# What a quick run of each compiles, and the beginning of its first figure's name.
RUNS = {
    "ceilings": ([], [], "matrix product"),
    "encoder": (["--images", "2", "--image-size", "112", "--exact"], ["encode 128 x 2 + 2"], "2 x 112 x 112"),
    "prefill": (["--sequences", "2", "--length", "40"], ["prefill 80", "sample 2 greedy"], "prefill 2 x 40"),
    "decode": (["--batch", "2", "--context", "70"], ["decode 2", "sample 2 greedy"], "decode 2, context 70"),
    "host": (["--queued", "40"], [], "preprocess 1008 x 1008"),
}


@pytest.mark.parametrize("subcommand", RUNS)
def test_a_benchmark_compiles_its_own_steps_and_reports(subcommand, monkeypatch, tmp_path, capsys):
    options, steps, name = RUNS[subcommand]
    compiled, real = [], Subject.compile

    def compile_and_note(self, jobs):
        compiled.extend(job.name for job in jobs)
        real(self, jobs)

    monkeypatch.setattr(Subject, "compile", compile_and_note)
    file = tmp_path / "figures.json"
    command = ["bench", subcommand, "--model", "demo", *options, "--repeat", "2", "--json", str(file)]
    assert main(command) == 0
    assert [step.removesuffix(" without prefix") for step in compiled] == steps
    report = json.loads(file.read_text())
    assert report["versions"]["jax"]
    assert {"command", "date", "device", "model", "host"} <= report.keys()
    assert report["figures"][0]["name"].startswith(name)
    assert all(figure["median_s"] > 0 and figure["rounds"] == 2 for figure in report["figures"])
    floors = [figure["floor_s"] for figure in report["figures"]]
    assert all(floor > 0 for floor in floors) if subcommand in ("encoder", "prefill", "decode") else not any(floors)
    assert name in capsys.readouterr().out


# The published layout with numbers that a CPU can run.
SHRUNK = {
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": 8000,
        "rope_parameters": {"rope_theta": 5e6, "mrope_section": [5, 4, 3], "mrope_interleaved": True},
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}


def test_random_weights_of_qwen3_vl_run(monkeypatch, capsys):
    published = SIZES["qwen3-vl-8b"]
    smaller = {section: published[section] | values for section, values in SHRUNK.items()}
    monkeypatch.setitem(SIZES, "qwen3-vl-8b", published | smaller)
    monkeypatch.setattr(Subject, "ceilings", lambda self, repeat: Ceilings(1e9, 1e9))  # others measure them
    for options in (
        ["encoder", "--images", "1", "--image-size", "288", "--exact"],
        ["decode", "--batch", "2", "--context", "70"],
    ):
        assert main(["bench", *options, "--size", "qwen3-vl-8b", "--repeat", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("1 x 288 x 288", "decode 2, context 70"))


@pytest.fixture
def served(tiny_llm, tiny_checkpoint, monkeypatch):
    """A subject whose serving benchmarks use the tests' engine."""

    @contextmanager
    def serving_tiny(subject, engine):
        with llm_kit.serving(tiny_llm()) as llm:
            yield llm

    for module in (serving, between_tokens):
        monkeypatch.setattr(module, "serving", serving_tiny)
    return Subject(str(tiny_checkpoint("qwen2_5_vl", **llm_kit.CHECKPOINT).path), None)


def test_first_token_meets_the_cache_that_it_names(served):
    new, same, turn = serving.bench_first_token(served, side=112, words=20, repeat=2)
    assert new.note.endswith("0 cached, 1 encoded")
    assert same.note.endswith("0 cached, 0 encoded")
    assert " 0 cached" not in turn.note
    assert turn.note.endswith("0 encoded")
    assert new.floor > same.floor > 0


def test_throughput_counts_whole_loads(served):
    (figure,) = serving.bench_throughput(served, requests=3, new_tokens=4, side=56, repeat=2)
    assert len(figure.seconds) == 2
    assert figure.note.startswith(f"{3 / figure.median:.3g} requests/s, {12 / figure.median:.0f} tok/s")
    assert figure.note.endswith(" 0 compiles")
    assert figure.floor > 0


def test_time_between_tokens_alone_and_with_pictures(served):
    step, alone, crowded = between_tokens.bench_between_tokens(
        served, batch=2, context=40, new_tokens=12, side=56, repeat=1
    )
    assert step.name == "decode 2, context 40"
    assert 0 < len(alone.seconds) <= 2 * 11
    assert "the device idles" in alone.note
    assert 0 <= alone.extra["idle"] < 1
    assert int(crowded.note.split("; ")[1].split()[0]) >= 1


def test_start_up_runs_in_processes_that_share_a_cache(monkeypatch):
    """Cold comes first, in an empty folder; warm finds what it left. Other caches of the user's stay out of it."""
    seen = []

    def run(command, *, env, **options):
        seen.append(env["XDG_CACHE_HOME"])
        assert command[-2:] == ["demo", ""]
        assert "JAX_COMPILATION_CACHE_DIR" not in env
        ready = {"import_s": 1, "weights_s": 2, "compile_s": 3, "executables": 4, "device": "cpu"}
        return SimpleNamespace(returncode=0, stdout=f"noise\n{json.dumps(ready)}\n", stderr="")

    monkeypatch.setattr(startup.subprocess, "run", run)
    (cold, warm), device = startup.bench_startup("demo", None, repeat=2)
    assert (cold.name, warm.name, device) == ("start to ready, cold cache", "start to ready, warm cache", "cpu")
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert np.isfinite([*cold.seconds, *warm.seconds]).all()


@pytest.mark.parametrize(
    "options", [["--repeat", "0"], ["--batch", "1,x"], ["--size", "huge"], ["--size", "qwen2.5-vl-3b", "--model", "x"]]
)
def test_unusable_options_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "decode", *options])
    assert "error" in capsys.readouterr().err
