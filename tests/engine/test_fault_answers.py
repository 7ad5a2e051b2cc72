# SPDX-License-Identifier: Apache-2.0
"""Claim: on the real model too, answers depend neither on neighbours nor on placeholders that the model writes."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
import tolerances
from llm_kit import GREEDY, assert_nothing_held, clip, noise, serving, user

import mmjax
from mmjax.inputs.items import ProcessedItem

SHOWN = mmjax.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=20)
PICTURE = noise(56, 84, 1)  # 2 x 3 rows


def assert_same(out, expected) -> None:
    """Tokens and their probabilities, up to arithmetic in another layout."""
    assert out.token_ids == expected.token_ids
    for ours, theirs in zip(out.logprobs, expected.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=tolerances.LOGITS)


TALKS = [
    user("how old is the moon?"),
    user(PICTURE, "what?"),
    user("why"),
    user("a", noise(84, 140, 2), "or", PICTURE, "?"),
    user((clip(4, 56, 84), {"fps": 2.0}), "where to?"),
]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_neighbours_do_not_matter_in_any_rotation(tiny_llm, tiny_reference, family):
    expected = [tiny_reference(family).chat(talk, SHOWN) for talk in TALKS]
    for first in range(len(TALKS)):
        order = [*range(first, len(TALKS)), *range(first)]
        with serving(tiny_llm(family)) as llm:
            for index, out in zip(order, llm.chat([TALKS[index] for index in order], SHOWN), strict=True):
                assert_same(out, expected[index])
            assert_nothing_held(llm)


# Placeholders that the model writes.


@pytest.fixture
def banned(llm):
    """A function that sets which ids the sampler may never take; they are an argument of every step."""
    runner = llm.running.machine.text
    before = runner._banned

    def ban(ids) -> None:
        mask = np.zeros(llm.model.cfg.vocab_size, bool)
        mask[list(ids)] = True
        runner._banned = jax.device_put(mask, runner.device)

    yield ban
    runner._banned = before


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_placeholder_in_an_answer_is_text(llm, tiny_reference, banned, kind, at):
    """The sampler is made to take it; what follows is what the judge computes of its plain embedding."""
    pad, runner = llm.model.processor.placeholder_id[kind], llm.running.machine.text
    drawn, calls = itertools.count(), {name: getattr(runner, name) for name in ("prefill", "decode")}

    def forced(name):
        def call(*arguments):
            forcing = next(drawn) == at
            banned(set(range(llm.model.cfg.vocab_size)) - {pad} if forcing else ())
            return calls[name](*arguments)

        return call

    params = mmjax.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=20)
    try:
        for name in calls:
            setattr(runner, name, forced(name))
        out = llm.chat(user(PICTURE, "?"), params)
    finally:
        for name in calls:
            delattr(runner, name)
    assert out.token_ids[at] == pad
    assert len(out.token_ids) == 8

    judge = tiny_reference()
    prompt = judge.frontend.chat(user(PICTURE, "?"), mmjax.frontend.InputOptions(), limit=None)
    rows = [judge.running.runner.encode(ProcessedItem(item.plan, item.patches)) for item in prompt.items]
    logits = judge.running.runner.logits(prompt, rows, out.token_ids[:-1]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for step, known in enumerate(out.logprobs):
        assert known.logprob == pytest.approx(logits[step, known.token_id], abs=tolerances.LOGITS)
    banned(llm.model.processor.never_sampled)
    assert llm.chat(user("still there?"), GREEDY).error is None
