# SPDX-License-Identifier: Apache-2.0
"""Claim: the engine serves DeepSeek-V4.1, whose pages hold no keys and values, like any other family."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from llm_kit import CHECKPOINT, assert_nothing_held, build, noise, png, serving, together, user
from test_nan_fill import HOLE, Poison, calm
from tolerances import OTHER_LAYOUT

import mmjax
from conversion.checkpoint import describe
from conversion.export import export
from conversion.loader import load_params
from conversion.orbax_io import convert
from conversion.verify import verify
from mmjax.compilation import CompileCounter
from mmjax.errors import CheckpointError, PlaceholderError, RequestError
from mmjax.models.deepseek_v4_1 import FAMILY

NAME = "deepseek_v4_1"
PLACEHOLDER = "<｜deepseek_image｜>"
PARAMS = mmjax.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5)

CONVERSATIONS = [
    user(calm(noise(84, 140, 1)), "what is it? " * 5),
    user("a word " * 10),
    user("one ", calm(noise(200, 60, 2)), " and ", calm(noise(56, 56, 3)), " which of them?"),
    user("tell me about " * 5),
]


@pytest.fixture
def served(tiny_llm):
    with serving(tiny_llm(NAME)) as llm:
        yield llm
        assert_nothing_held(llm)


def answers(llm) -> list:
    """Tokens and log-probabilities of all conversations at once, twice: then pages and rows come from the caches."""
    seen = []
    for _ in range(2):
        with together(llm):
            handles = [llm.submit(messages, PARAMS) for messages in CONVERSATIONS]
        outs = [handle.result() for handle in handles]
        seen += [(out.token_ids, [step.logprob for step in out.logprobs]) for out in outs]
    return seen


@pytest.fixture(scope="module")
def expected(tiny_reference):
    """What the slow path says, twice."""
    outs = tiny_reference(NAME).chat(CONVERSATIONS, PARAMS)
    return [(out.token_ids, [step.logprob for step in out.logprobs]) for out in outs] * 2


@pytest.mark.parametrize(
    "limits",
    [{"chunk_tokens": 5}, {"chunk_tokens": 24, "enable_block_reuse": False}, {"max_batch_size": 2}],
    ids=str,
)
def test_chunks_prefixes_and_batches_change_nothing(tiny_llm, expected, limits):
    with serving(tiny_llm(NAME), **limits) as llm:
        found = answers(llm)
        reused = llm.stats().pages["reused_tokens"]
        assert_nothing_held(llm)
    assert bool(reused) == limits.get("enable_block_reuse", True)
    for (tokens, logprobs), (wanted, wanted_logprobs) in zip(found, expected, strict=True):
        assert tokens == wanted
        np.testing.assert_allclose(logprobs, wanted_logprobs, rtol=0, atol=OTHER_LAYOUT)


def test_nan_in_all_that_is_unused_changes_no_bit(tiny_llm, monkeypatch):
    with serving(tiny_llm(NAME), chunk_tokens=24) as llm:
        clean = answers(llm)
    with serving(tiny_llm(NAME), chunk_tokens=24) as llm:
        poison = Poison(llm.running)
        llm.running.call(lambda: poison.install(monkeypatch))
        dirty = answers(llm)
        llm.running.call(monkeypatch.undo)
    assert HOLE == 255
    assert dirty == clean
    assert all(poison.poisoned[kind] > 50 for kind in ("page slots", "tails", "rows", "patches")), poison.poisoned


def test_after_the_start_nothing_compiles(served):
    sizes = [(84, 140), (9, 300), (400, 30), (56, 56), (333, 217)]
    counter = CompileCounter().start()
    outs = served.chat([user(noise(*size), "?" * i) for i, size in enumerate(sizes)] + CONVERSATIONS, PARAMS)
    rows = served.encode([noise(60, 700), png(noise(31, 44))])
    given = served.chat(user(noise(31, 44), "?"), PARAMS, multi_modal_embeddings={"image": [rows[1]]})
    counter.stop()
    assert [out.error for out in outs if out.error is not None] == []
    assert given.usage.image_tokens == len(rows[1])
    assert counter.count == 0


# ---- prompts ------------------------------------------------------------------------------------------------------


def test_one_placeholder_inside_the_text_becomes_the_whole_span(served):
    out = served.chat(CONVERSATIONS[2], PARAMS)
    plans = [served.model.processor.plan_image(*size, {}) for size in ((200, 60), (56, 56))]
    image, text = served.model.cfg.image_token_id, served.model.tokenizer
    ids = list(out.prompt_token_ids)
    spans = [ids.index(image), len(ids) - 1 - ids[::-1].index(image)]
    assert ids.count(image) == sum(plan.rows for plan in plans)
    assert text.decode(ids[: spans[0]]).endswith("user\none ")
    between = spans[0] + plans[0].rows
    assert text.decode(ids[between : between + 5]) == " and "
    assert out.usage.image_tokens == sum(plan.rows for plan in plans)


def test_text_cannot_forge_a_placeholder(served):
    plain = served.chat(user(f"look: {PLACEHOLDER}"), PARAMS)
    assert served.model.cfg.image_token_id not in plain.prompt_token_ids
    assert served.model.tokenizer.decode(plain.prompt_token_ids).count(PLACEHOLDER) == 1


def test_what_the_model_does_not_take(served):
    with pytest.raises(RequestError, match="no processor options, got max_pixels"):
        served.chat(CONVERSATIONS[0], PARAMS, mm_processor_kwargs={"max_pixels": 3136})
    with pytest.raises(RequestError, match="takes no video"):
        served.chat(user(np.zeros((2, 56, 56, 3), np.uint8), "?"), PARAMS)
    with pytest.raises(PlaceholderError):
        served.generate(f"two {PLACEHOLDER} {PLACEHOLDER}", PARAMS, multi_modal_data={"image": [noise(56, 56)]})


# ---- checkpoints --------------------------------------------------------------------------------------------------


def same(got, want) -> bool:
    return all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_survive_conversion_and_export(tiny_checkpoint, tmp_path, dtype):
    path = tiny_checkpoint(NAME, **CHECKPOINT).path
    source = describe(path)
    cfg = replace(FAMILY.config(source.config), dtype=dtype)
    params = load_params(path, FAMILY, cfg, progress=False)
    converted = convert(path, tmp_path / "converted", dtype, progress=False)
    assert same(load_params(converted, FAMILY, cfg, progress=False), params)
    export(params, FAMILY, cfg, tmp_path / "exported", config=source.config)
    for file in source.companions():
        if file.name != "config.json":
            (tmp_path / "exported" / file.name).write_bytes(file.read_bytes())
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == dtype
    assert same(load_params(tmp_path / "exported", FAMILY, cfg, progress=False), params)
    stored = {tensor.name: tensor.dtype for tensor in describe(tmp_path / "exported").tensors()}
    assert stored.keys() == {tensor.name for tensor in source.tensors()}
    assert stored["layers.0.ffn.gate.tid2eid"] == "I64"
    assert stored["layers.0.attn.attn_sink"] == "F32"


def test_a_converted_checkpoint_answers_alike(tiny_checkpoint, tiny_reference, tmp_path, expected):
    converted = convert(tiny_checkpoint(NAME, **CHECKPOINT).path, tmp_path / "converted", progress=False)
    with build(converted, reference=True) as llm:
        out = llm.chat(CONVERSATIONS[0], PARAMS)
    assert out.token_ids == expected[0][0]


def test_verify_says_what_transformers_lacks(tiny_checkpoint):
    path = tiny_checkpoint(NAME, **CHECKPOINT).path
    assert not list(path.glob("*processor*"))  # config.json has all of the processor's settings
    with pytest.raises(CheckpointError, match="has no model of type 'deepseek_v4_1'"):
        verify(path, "transformers", progress=False)
