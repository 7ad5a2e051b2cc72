# SPDX-License-Identifier: Apache-2.0
"""Claim: with the real model too, answers do not depend on chunks, reused prefixes, neighbours or what is sampled."""

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


def prompt_of(llm, before: int, after: int) -> list[int]:
    """So much text, a picture's placeholder, so much text."""
    return [*range(before), llm.model.processor.placeholder_id["image"], *range(100, 100 + after)]


def assert_same(out, expected) -> None:
    """Tokens and their probabilities, up to arithmetic in another layout."""
    assert out.token_ids == expected.token_ids
    for ours, theirs in zip(out.logprobs, expected.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=10 * tolerances.OTHER_LAYOUT)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_chunks_of_every_size_give_the_logits_of_one(tiny_llm, tiny_reference, family):
    """8 text, a picture of 6 rows, 8 text."""
    ids, data = prompt_of(tiny_llm(family), 8, 8), {"image": [PICTURE]}
    expected = tiny_reference(family).generate(ids, SHOWN, data)
    for chunk in range(1, 23):
        with serving(tiny_llm(family), chunk_tokens=chunk, trace=100) as llm:
            out = llm.generate(ids, SHOWN, data)
            chunks = [(begin, end) for row in llm.running.engine.trace.rows for _, begin, end in row.chunks]
            assert chunks == [(begin, min(begin + chunk, 22)) for begin in range(0, 22, chunk)]
            assert out.metrics.items_encoded == 1
            assert_same(out, expected)


@pytest.mark.parametrize("before", range(11, 17))
def test_a_prefix_that_ends_inside_a_picture(llm, tiny_reference, before):
    """Pages of 16: the first one holds 16 - before rows of the picture, with its rows kept and without."""
    ids, data = prompt_of(llm, before, 9), {"image": [PICTURE]}
    expected = tiny_reference().generate(ids, SHOWN, data)
    first, again = (llm.generate(ids, SHOWN, data) for _ in range(2))
    llm.running.call(llm.running.items.invalidate)
    encoded_again = llm.generate(ids, SHOWN, data)
    for out, hit in ((first, 0), (again, 16), (encoded_again, 16)):
        assert out.metrics.prefix_tokens_reused == hit
        assert_same(out, expected)
    assert encoded_again.metrics.items_encoded == 1


def test_another_picture_shares_the_text_before_it_alone(llm, tiny_reference):
    """32 text, 6 rows, 20 text, pages of 16."""
    ids, pictures = prompt_of(llm, 32, 20), [PICTURE, noise(56, 84, 2), PICTURE]
    for picture, hit in zip(pictures, (0, 32, 48), strict=True):
        out = llm.generate(ids, SHOWN, {"image": [picture]})
        assert out.metrics.prefix_tokens_reused == out.usage.cached_tokens == hit
        assert_same(out, tiny_reference().generate(ids, SHOWN, {"image": [picture]}))


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
        with serving(tiny_llm(family), trace=100) as llm:
            for index, out in zip(order, llm.chat([TALKS[index] for index in order], SHOWN), strict=True):
                assert_same(out, expected[index])
            assert_nothing_held(llm)


def test_rows_in_use_never_exceed_a_small_pool(llm):
    """Three pictures of 15 rows, a pool of 16 (rounded up to what one needs), chunks smaller than each."""
    pictures = [noise(84, 140, seed) for seed in range(3)]
    messages = user(*pictures, "?")
    expected = llm.chat(messages, GREEDY)
    budgets = {"output_bytes": 16 * 256, "reuse_bytes": 0, "capacity_rows": 16}
    with serving(llm, chunk_tokens=6, trace=200, budgets=budgets) as small:
        out = small.chat(messages, GREEDY)
        rows = list(small.running.engine.trace.rows)
    assert out.token_ids == expected.token_ids
    assert [item for row in rows for item in row.items] == [(out.request_id, index) for index in range(3)]
    assert max(row.rows_in_use for row in rows) <= 16


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


def test_a_placeholder_is_never_sampled_unless_asked_for(llm, banned):
    """Hot enough that every id comes up: 400 draws miss one of 268 with probability 0.2."""
    hot = mmjax.SamplingParams(max_tokens=400, temperature=1e4, ignore_eos=True, seed=1)
    guarded = set(llm.model.processor.never_sampled)
    assert guarded >= set(llm.model.processor.placeholder_id.values())
    outs = llm.chat([user(PICTURE, "?"), user("?")], hot)
    assert not guarded & {token for out in outs for token in out.token_ids}
    banned(())
    outs = llm.chat([user(PICTURE, "?"), user("?")], hot)
    assert guarded & {token for out in outs for token in out.token_ids}


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
