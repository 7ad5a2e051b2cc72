# SPDX-License-Identifier: Apache-2.0
"""Claim: the engine and its judge give transformers' embeddings, logits and greedy tokens, whatever a request holds."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tolerances
from greedy_kit import NEW_TOKENS, TALKS, Judged, Talk, judge
from llm_kit import CHECKPOINT, assert_nothing_held, serving

import mmjax
from mmjax.config import PrefillBucket
from mmjax.frontend import InputOptions
from mmjax.inputs.items import ProcessedItem
from mmjax.loading import open_model
from mmjax.models.steps import embed_tokens

WITHOUT_CLIPS = ("mistral3", "pixtral", "lighton_ocr")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "hyperclovax", *WITHOUT_CLIPS)
PARAMS = mmjax.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=20)


def talks(family: str) -> list[str]:
    """Names of the talks about what the family takes."""
    return [name for name, talk in TALKS.items() if not (talk.videos and family in WITHOUT_CLIPS)]


EVERY_TALK = [(family, name) for family in FAMILIES for name in talks(family)]


@pytest.fixture(scope="module")
def judged(tiny_checkpoint):
    """A function (family, talk's name) -> Judged."""
    made = {}

    def make(family: str, name: str) -> Judged:
        if (family, name) not in made:
            checkpoint = tiny_checkpoint(family, **CHECKPOINT)
            never = open_model(checkpoint.path, dtype="float32", device=jax.devices()[0]).processor.never_sampled
            made[family, name] = judge(checkpoint, TALKS[name], never)
        return made[family, name]

    return make


def count_ties(llm: mmjax.LLM, out: mmjax.RequestOutput, talk: Talk, expected: Judged) -> int:
    """Checks an answer; where transformers has a tie, goes on behind its choice. Returns how often it had to."""
    ties, start, tokens = 0, 0, out.token_ids
    while tokens != expected.tokens[start:]:
        differing = [ours != theirs for ours, theirs in zip(tokens, expected.tokens[start:], strict=True)]
        at = start + differing.index(True)
        assert expected.margins[at] < tolerances.TIE, (
            f"token {at}: {tokens[at - start]} instead of {expected.tokens[at]}"
        )
        ties, start = ties + 1, at + 1
        if start == NEW_TOKENS:
            break
        rest = mmjax.SamplingParams(max_tokens=NEW_TOKENS - start, temperature=0.0, ignore_eos=True)
        prompt = [*expected.prompt_ids, *expected.tokens[:start]]
        tokens = llm.generate(prompt, rest, talk.media()).token_ids
    return ties


def check_logprobs(out: mmjax.RequestOutput, expected: Judged) -> None:
    """The engine's log-probabilities up to the first token that differs."""
    shifted = expected.logits - expected.logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    for step, (ours, token) in enumerate(zip(out.logprobs, expected.tokens, strict=True)):
        ids, values = list(ours.top), list(ours.top.values())
        np.testing.assert_allclose(values, logprobs[step][ids], rtol=0, atol=tolerances.LOGITS)
        if ours.token_id != token:
            return
        assert ours.logprob == pytest.approx(logprobs[step][token], abs=tolerances.LOGITS)


@pytest.mark.parametrize(("family", "name"), EVERY_TALK)
def test_the_engine_answers_as_transformers_does(tiny_llm, judged, parity_record, family, name):
    with serving(tiny_llm(family)) as llm:
        out = llm.chat(TALKS[name].messages(), PARAMS)
        expected = judged(family, name)
        assert out.prompt_token_ids == expected.prompt_ids
        check_logprobs(out, expected)
        ties = count_ties(llm, out, TALKS[name], expected)
        assert ties <= 1
        parity_record.greedy(family, NEW_TOKENS, ties)
        assert_nothing_held(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_answers_as_transformers_does(tiny_llm, judged, family):
    names = [*talks(family), *talks(family)[::-1]]
    with serving(tiny_llm(family), trace=100) as llm:
        outs = llm.chat([TALKS[name].messages() for name in names], PARAMS)
        assert max(row.decodes for row in llm.running.engine.trace.rows) == 4  # they did run together
        for name, out in zip(names, outs, strict=True):
            assert out.error is None
            check_logprobs(out, judged(family, name))
            assert count_ties(llm, out, TALKS[name], judged(family, name)) <= 1


@pytest.mark.parametrize(("family", "name"), EVERY_TALK)
def test_the_judge_agrees_with_transformers(tiny_reference, judged, parity_record, family, name):
    llm, expected = tiny_reference(family), judged(family, name)
    out = llm.chat(TALKS[name].messages(), PARAMS)
    assert out.prompt_token_ids == expected.prompt_ids
    assert count_ties(llm, out, TALKS[name], expected) <= 1
    runner = llm.running.runner
    prompt = llm.frontend.chat(TALKS[name].messages(), InputOptions(), limit=None)
    rows = [runner.encode(ProcessedItem(item.plan, item.patches)) for item in prompt.items]
    logits = runner.logits(prompt, rows, expected.tokens[:-1])
    np.testing.assert_allclose(logits, expected.logits, rtol=0, atol=tolerances.LOGITS)
    assert np.abs(expected.logits).max() > 1  # far above the tolerance
    parity_record.difference(family, "logits", logits, expected.logits)


@pytest.mark.parametrize(("family", "name"), EVERY_TALK)
def test_the_prefill_step_sees_the_decoder_input_of_transformers(tiny_llm, judged, family, name, monkeypatch):
    seen = []
    with serving(tiny_llm(family)) as llm:
        runner = llm.running.machine.text

        def prefill(chunks, row_slots, original=runner.prefill):
            tokens = sum(map(len, chunks))
            inputs, _ = runner._prefill_inputs(chunks, PrefillBucket(tokens, len(chunks)), row_slots, any_prefix=True)
            pool = runner._pool()
            hidden, _, _ = embed_tokens(
                runner.family, runner.cfg, runner.params, pool, inputs.token_ids, inputs.row_index
            )
            seen.append(np.asarray(hidden))
            return original(chunks, row_slots)

        monkeypatch.setattr(runner, "prefill", prefill)
        llm.chat(TALKS[name].messages(), mmjax.SamplingParams(max_tokens=1))
    embeds = judged(family, name).embeds
    np.testing.assert_allclose(np.concatenate(seen), embeds, rtol=0, atol=tolerances.TOWER_ROWS)
