# SPDX-License-Identifier: Apache-2.0
"""Claim: the step trace tells what each step did, and opens where people look at traces."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from llm_kit import CHECKPOINT, ENGINE, GREEDY, MULTIMODAL, build, noise, serving, user

import mmjax


def test_rows_cover_the_prompt_and_save_as_a_chrome_trace(tiny_llm, tmp_path):
    params = mmjax.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with serving(tiny_llm(), trace=100, chunk_tokens=16) as llm:
        output = llm.chat(user(noise(84, 84, seed=3), "What is it?"), params)
        rows = list(llm.trace.rows)
        saved = json.loads(llm.trace.save(tmp_path / "trace.json").read_text())
    chunks = [chunk for row in rows for chunk in row.chunks]
    assert [begin for _, begin, _ in chunks] == [0, *(end for _, _, end in chunks[:-1])]
    assert chunks[-1][2] == output.usage.prompt_tokens
    assert [item for row in rows for item in row.items] == [(output.request_id, 0)]
    assert sum(row.decodes for row in rows) == 3
    assert all(earlier.end <= later.begin for earlier, later in itertools.pairwise(rows))
    assert [row.tokens_left for row in rows if row.chunks][:2] == [0, 0]
    assert [row.encoder_tokens_left for row in rows if row.items] == [512 - 36]
    names = {event["name"].split()[0] for event in saved["traceEvents"]}
    assert names == {"step", "prefill", "encode", "decode", "in"}
    assert all(event["dur"] >= 0 for event in saved["traceEvents"] if event["ph"] == "X")


def test_as_many_rows_are_kept_as_the_configuration_says(tiny_checkpoint):
    engine = replace(ENGINE, trace_steps=3, compile_threads=1)
    multimodal = replace(MULTIMODAL, disable_mm_encoder=True, media_threads=1)
    with build(tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path, engine=engine, multimodal=multimodal) as llm:
        llm.chat(user("hello"), GREEDY)
        assert [row.decodes for row in llm.trace.rows] == [1, 1, 1]
        assert [row.index for row in llm.trace.rows] == list(range(llm.trace.steps - 3, llm.trace.steps))


def test_the_trace_can_be_drawn(tiny_llm):
    matplotlib = pytest.importorskip("matplotlib", reason="needs the notebooks extra")
    matplotlib.use("agg")
    with serving(tiny_llm(), trace=100) as llm:
        llm.chat(user("hello"), mmjax.SamplingParams(max_tokens=3))
        axes = llm.trace.plot()
    assert next(text.get_text() for text in axes.get_legend().get_texts()) == "prefill tokens"
