# SPDX-License-Identifier: Apache-2.0
"""Claim: a request that gives up its pages in the middle goes on later with the tokens it would have had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llm_kit import GREEDY, assert_nothing_held, clip, noise, png, serving, together, user
from tolerances import OTHER_LAYOUT

import mmjax
from mmjax.errors import RequestError

pytestmark = pytest.mark.timeout(300)

LONG = mmjax.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
REQUESTS = [
    (user(noise(84, 140, 1), "what?"), LONG),
    (user(png(noise(150, 90, 2)), "and", clip(4, 56, 84, 3), "which?"), replace(LONG, temperature=0.9, seed=4)),
    (user("tell me a tale"), replace(LONG, repetition_penalty=1.3, frequency_penalty=0.4)),
    (user("so", png(noise(56, 112, 5)), "?"), replace(LONG, temperature=0.7, seed=1, presence_penalty=1.0)),
]
NO_REUSE = {"budgets": {"reuse_bytes": 0}, "enable_block_reuse": False}  # neither rows nor pages outlive their user


@pytest.fixture(scope="module")
def alone(tiny_llm):
    answers = []
    for messages, params in REQUESTS:
        with serving(tiny_llm()) as llm:
            answers.append(llm.chat(messages, params))
    return answers


def preempt_at(llm, monkeypatch, steps) -> None:
    """Preempts whoever runs before each of these steps, once their tokens have been read."""
    engine, count = llm.running.engine, iter(range(10_000))

    def step(original=engine.step):
        if next(count) in steps:
            engine._collect(keep=0)
            for request in engine.scheduler.running[::-1]:
                engine.scheduler.preempt(request)
        return original()

    monkeypatch.setattr(engine, "step", step)


@pytest.mark.parametrize("reuse", [{}, NO_REUSE], ids=["with caches", "without"])
@pytest.mark.parametrize("blocks", [9, 12, 17])
def test_too_few_pages_for_all_change_no_token(tiny_llm, alone, blocks, reuse):
    """Each needs 5 to 6 pages at its end."""
    with serving(tiny_llm(), block_limit=blocks, **reuse) as llm:
        with together(llm):
            handles = [llm.submit(messages, params) for messages, params in REQUESTS]
        deltas = [list(handle.stream()) for handle in handles]
        outs = [handle.result() for handle in handles]
        preemptions = llm.stats().queues["preemptions"]
        assert_nothing_held(llm)
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert ["".join(delta.text for delta in part) for part in deltas] == [out.text for out in alone]
    assert preemptions > 0
    for out, (messages, _) in zip(outs, REQUESTS, strict=True):
        items = sum(part["type"] != "text" for part in messages[0]["content"])
        assert out.metrics.items_encoded <= items * (1 + preemptions)
        assert out.metrics.items_encoded + out.metrics.items_cached >= items


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_preempted_before_any_step(tiny_llm, alone, overlap, monkeypatch):
    """Before every single step of an answer, with everything evicted: encoded once more each time, no token changes."""
    messages, params = REQUESTS[1]
    steps = 0
    with serving(tiny_llm(), **NO_REUSE, chunk_tokens=24, disable_overlap_scheduler=not overlap) as llm:
        out = llm.chat(messages, params)
        steps = llm.running.engine.trace.steps
    assert out.token_ids == alone[1].token_ids
    for at in range(1, steps, 3):
        with serving(tiny_llm(), **NO_REUSE, chunk_tokens=24, disable_overlap_scheduler=not overlap) as llm:
            preempt_at(llm, monkeypatch, {at})
            out = llm.chat(messages, params)
            monkeypatch.undo()
            assert out.token_ids == alone[1].token_ids, at
            assert 2 <= out.metrics.items_encoded <= 4
            assert_nothing_held(llm)


def test_preempted_again_and_again(tiny_llm, alone, monkeypatch):
    with serving(tiny_llm(), **NO_REUSE, chunk_tokens=50) as llm:
        preempt_at(llm, monkeypatch, set(range(8, 120, 8)))
        with together(llm):
            handles = [llm.submit(messages, params) for messages, params in REQUESTS]
        outs = [handle.result() for handle in handles]
        preemptions = llm.stats().queues["preemptions"]
        monkeypatch.undo()
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert preemptions > 20


def test_logprobs_are_each_reported_once(tiny_llm, monkeypatch):
    messages, params = REQUESTS[0][0], replace(LONG, logprobs=2)
    with serving(tiny_llm()) as llm:
        whole = llm.chat(messages, params)
    with serving(tiny_llm(), **NO_REUSE) as llm:
        preempt_at(llm, monkeypatch, {5, 20})
        out = llm.chat(messages, params)
        monkeypatch.undo()
    assert [step.token_id for step in out.logprobs] == out.token_ids == whole.token_ids
    assert [step.logprob for step in out.logprobs] == pytest.approx(
        [step.logprob for step in whole.logprobs], abs=OTHER_LAYOUT
    )


def test_whole_prompts_that_no_longer_fit_a_step(tiny_llm, alone, monkeypatch):
    """Without chunked prefill a prompt fits a step, but with what was answered before a preemption it may not."""
    with serving(tiny_llm(), **NO_REUSE, chunk_tokens=60, enable_chunked_prefill=False) as llm:
        preempt_at(llm, monkeypatch, {35})
        out = llm.chat(*REQUESTS[0])
        monkeypatch.undo()
    assert out.token_ids == alone[0].token_ids


def test_a_picture_that_can_not_be_had_again(tiny_llm, alone, monkeypatch):
    """The request fails and says which item; its neighbour does not."""
    with serving(tiny_llm(), **NO_REUSE) as llm:
        restore = llm.running.engine.pixels.restore

        def broken(items):
            if items[0].index == 1:
                raise OSError("gone")
            return restore(items)

        monkeypatch.setattr(llm.running.engine.pixels, "restore", broken)
        preempt_at(llm, monkeypatch, {10})
        with together(llm):
            handles = [llm.submit(messages, params) for messages, params in REQUESTS[:2]]
        outs = [handle.wait() for handle in handles]
        monkeypatch.undo()
        assert outs[0].token_ids == alone[0].token_ids
        assert isinstance(outs[1].error, RequestError)
        assert (outs[1].error.item, outs[1].error.request_id) == (1, handles[1].request_id)
        assert outs[1].token_ids == alone[1].token_ids[: len(outs[1].token_ids)]
        assert_nothing_held(llm)


def test_rows_that_vanish_after_a_request_was_resumed(tiny_llm, monkeypatch):
    """Resumed because another request's rows were there, which are evicted before its prefill reaches them."""
    messages = user(noise(84, 140, 1), "a" * 60, noise(150, 90, 2), "what?")
    with serving(tiny_llm()) as llm:
        expected = llm.chat(messages, GREEDY).token_ids
    with serving(tiny_llm(), enable_block_reuse=False, chunk_tokens=40) as llm:
        engine, count = llm.running.engine, iter(range(10_000))

        def step(original=engine.step):
            at = next(count)
            if at == 8:  # in mid-answer: rows of both pictures lie in the cache, their pixels are gone
                engine._collect(keep=0)
                engine.scheduler.preempt(engine.scheduler.running[0])
            if at == 9:  # it runs again and has not reached the second picture
                key = engine._requests[next(iter(engine._requests))].prompt.items[1].cache_key
                engine.items.cache.pop(key)
            return original()

        monkeypatch.setattr(engine, "step", step)
        out = llm.chat(messages, GREEDY)
        monkeypatch.undo()
        assert out.token_ids == expected
        assert (out.metrics.items_encoded, out.metrics.items_cached) == (3, 1)
        assert_nothing_held(llm)


def test_cancelled_while_its_pixels_are_decoded_again(tiny_llm, monkeypatch):
    with serving(tiny_llm(), **NO_REUSE) as llm:
        restore, handles = llm.running.engine.pixels.restore, []

        def slow(items):
            handles[0].cancel()
            llm.running.call(lambda: None)  # the cancel has been read
            return restore(items)

        monkeypatch.setattr(llm.running.engine.pixels, "restore", slow)
        preempt_at(llm, monkeypatch, {6})
        with together(llm):
            handles.append(llm.submit(*REQUESTS[0]))
        assert handles[0].result(60).finish_reason == "cancelled"
        monkeypatch.undo()
        assert_nothing_held(llm)
