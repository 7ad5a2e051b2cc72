# SPDX-License-Identifier: Apache-2.0
"""Claim: chunk sizes, reused prefixes and shared rows change what is computed and never what comes out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tolerances
from llm_kit import assert_nothing_held, clip, noise, serving, together, user

import mmjax

pytestmark = pytest.mark.timeout(300)

PARAMS = mmjax.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=20)
PLAIN = mmjax.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def same(out: mmjax.RequestOutput, cold: mmjax.RequestOutput) -> None:
    """Equal tokens, and log-probabilities as close as another layout allows."""
    assert out.token_ids == cold.token_ids
    for ours, theirs in zip(out.logprobs, cold.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=tolerances.OTHER_LAYOUT)
        common = [token for token in ours.top if token in theirs.top]
        assert len(common) >= 19  # the twentieth may tie
        np.testing.assert_allclose(
            [ours.top[token] for token in common],
            [theirs.top[token] for token in common],
            rtol=0,
            atol=tolerances.OTHER_LAYOUT,
        )


@pytest.fixture
def encodes(llm, monkeypatch):
    """Digests of every item that the tower runs on, in order."""
    engine, seen = llm.running.engine, []

    def pack(batch, original=engine._pack):
        seen.extend(engine._item(entry).digest for entry in batch.items)
        return original(batch)

    monkeypatch.setattr(engine, "_pack", pack)
    return seen


@pytest.fixture
def cuts(llm, monkeypatch):
    """Shapes of the pictures that are cut to patches, in order."""
    seen, cut = [], type(llm.model.processor).image

    def image(self, rgb, options):
        seen.append(rgb.shape)
        return cut(self, rgb, options)

    monkeypatch.setattr(type(llm.model.processor), "image", image)
    return seen


# ---- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_every_chunk_size_gives_the_one_shot_answer(tiny_llm, family):
    """Two pictures and a clip of 15, 6 and 12 rows: every cut through each of them."""
    messages = user("a", noise(84, 140, 1), noise(56, 84, 2), "and then", clip(4, 56, 84, 3), "what?")
    with serving(tiny_llm(family)) as llm:
        cold = llm.chat(messages, PARAMS)
        length = len(cold.prompt_token_ids)
    assert 60 < length < 128
    for chunk in (*range(1, 33), 47, length - 1, length):
        with serving(tiny_llm(family), chunk_tokens=chunk, enable_block_reuse=False, trace=200) as llm:
            out = llm.chat(messages, PARAMS)
            same(out, cold)
            chunks = [end - begin for row in llm.running.engine.trace.rows for _, begin, end in row.chunks]
            assert sum(chunks) == length
            assert max(chunks) == chunk
            assert out.metrics.items_encoded == 3  # once each, however many chunks use it


def test_a_long_clip_streams_through_a_small_pool(tiny_llm):
    """Rows are given back as the prompt goes on: three items of 49 rows through a pool that holds two."""
    messages = user(*[noise(200, 200, i) for i in range(3)], "what?")
    with serving(tiny_llm()) as llm:
        cold = llm.chat(messages, PARAMS)
    with serving(tiny_llm(), budgets={"capacity_rows": 100, "reuse_bytes": 0}, chunk_tokens=20, trace=200) as llm:
        same(llm.chat(messages, PARAMS), cold)
        assert max(row.rows_in_use for row in llm.running.engine.trace.rows) <= 100


def test_budgets_of_the_encoder_change_nothing(tiny_llm):
    conversations = [user(noise(84, 140, i), noise(150, 90, 9), "what?") for i in range(4)]
    with serving(tiny_llm()) as llm:
        cold = [llm.chat(messages, PARAMS) for messages in conversations]
    for limits in (
        {"budgets": {"batch_size": 1}},
        {"budgets": {"max_num_tokens": 128}},
        {"multimodal": {"encoder_scheduling_policy": "eager"}},
        {"multimodal": {"encoder_scheduling_policy": "disabled"}},
        {"multimodal": {"encoder_tokens_while_decoding": 60}, "chunk_tokens": 30},
        {"disable_overlap_scheduler": True},
    ):
        with serving(tiny_llm(), **limits) as llm:
            with together(llm):
                handles = [llm.submit(messages, PARAMS) for messages in conversations]
            for handle, expected in zip(handles, cold, strict=True):
                same(handle.result(), expected)
            assert_nothing_held(llm)


# ---- prefixes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_kept", [True, False], ids=["rows kept", "rows evicted"])
def test_a_prefix_may_end_inside_a_picture(llm, encodes, monkeypatch, rows_kept):
    """Pages of 16: hits of 16 to 80 tokens, most of them inside the 49 rows of the picture."""
    messages = user("see", noise(200, 200, 1), "and tell me what it shows")
    cold = llm.chat(messages, PARAMS)
    span = llm.explain(messages).spans[0].runs[0]
    pages, length = llm.running.pages, len(cold.prompt_token_ids)
    assert span[1] == 49
    for hit in range(0, length - 1, 16):
        del encodes[:]
        monkeypatch.setattr(
            pages,
            "match",
            lambda keys, tokens, limit, most=hit, match=pages.match: match(keys, tokens, min(limit, most)),
        )
        if not rows_kept:
            llm.running.call(llm.running.items.cache.clear)
        out = llm.chat(messages, PARAMS)
        monkeypatch.setattr(pages, "match", type(pages).match.__get__(pages))
        same(out, cold)
        assert out.metrics.prefix_tokens_reused == out.usage.cached_tokens == hit
        assert len(encodes) == (0 if rows_kept or hit >= sum(span) else 1)
    assert length > sum(span) + 16


def test_pages_are_shared_up_to_the_picture_that_differs(llm):
    """Text before it is shared, nothing from it on, though the ids are the same."""
    ask = "look at this one for a while: "
    first = llm.chat(user(ask, noise(84, 140, 1), "what?"), PARAMS)
    other = llm.chat(user(ask, noise(84, 140, 2), "what?"), PARAMS)
    same_again = llm.chat(user(ask, noise(84, 140, 1), "what?"), PARAMS)
    start = llm.explain(user(ask, noise(84, 140, 1), "what?")).spans[0].runs[0][0]
    assert first.prompt_token_ids == other.prompt_token_ids
    assert other.usage.cached_tokens == start // 16 * 16 > 0
    assert same_again.usage.cached_tokens == (len(first.prompt_token_ids) - 1) // 16 * 16
    same(same_again, first)
    with_other = llm.chat(user(ask, noise(84, 140, 2), "what?"), PARAMS)
    same(with_other, other)
    assert first.logprobs[0].logprob != other.logprobs[0].logprob


def test_a_prompt_that_waits_is_counted_once(tiny_llm):
    """It asks in every step for what is known of it; what it reuses in the end is what counts."""
    messages, long = user("a" * 70), mmjax.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with serving(tiny_llm(), block_limit=11) as llm:
        llm.chat(messages, PLAIN)
        with together(llm):  # the first takes 8 pages and more, the second needs 6
            first, second = llm.submit(user("b" * 100), long), llm.submit(messages, PLAIN)
        outs = [first.result(), second.result()]
        stats = llm.stats()
    assert outs[1].metrics.queued > outs[0].metrics.first_token
    assert stats.queues["preemptions"] == 0
    assert (stats.pages["lookups"], stats.pages["hits"]) == (3, 1)
    assert stats.pages["reused_tokens"] == outs[1].usage.cached_tokens == 16


def test_a_tenant_shares_with_itself_alone(llm):
    messages = user(noise(84, 140, 1), "what is this?")
    outs = [llm.chat(messages, PARAMS, cache_salt=salt) for salt in ("a", "b", "a", None)]
    assert [out.usage.cached_tokens > 0 for out in outs] == [False, False, True, False]
    assert [out.metrics.items_encoded for out in outs] == [1, 1, 0, 1]
    for out in outs[1:]:
        same(out, outs[0])


def test_a_conversation_goes_on(llm):
    """The next turn finds the pages of the last one, answer included."""
    turns = user(noise(84, 140, 1), "what is this?")
    answer = llm.chat(turns, mmjax.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    prompt = [*answer.prompt_token_ids, *answer.token_ids, 10, 65, 66]
    media = {"image": [noise(84, 140, 1)]}
    warm = llm.generate(prompt, PARAMS, media)
    assert warm.usage.cached_tokens == (len(answer.prompt_token_ids) + 40) // 16 * 16
    assert warm.metrics.items_encoded == 0
    same(warm, llm.generate(prompt, PARAMS, media, cache_salt="cold"))


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_one_picture_in_ten_requests_is_encoded_once(llm, encodes):
    with together(llm):
        handles = [llm.submit(user(f"{i}", noise(84, 140, 1), "what?"), PLAIN) for i in range(10)]
    outs = [handle.result() for handle in handles]
    assert len(encodes) == 1
    assert sum(out.metrics.items_encoded for out in outs) == 1
    assert sum(out.metrics.items_cached for out in outs) == 9
    for i, out in enumerate(outs):
        assert out.token_ids == llm.chat(user(f"{i}", noise(84, 140, 1), "what?"), PLAIN, cache_salt="x").token_ids


def test_two_known_pictures_of_three(llm, encodes):
    llm.encode([noise(84, 140, 1), noise(84, 140, 3)])
    assert len(encodes) == 2
    out = llm.chat(user(*[noise(84, 140, i) for i in (1, 2, 3)], "what?"), PLAIN)
    assert len(encodes) == 3
    assert (out.metrics.items_encoded, out.metrics.items_cached) == (1, 2)


def test_one_picture_three_times_in_a_request(llm, encodes):
    a, b = noise(84, 140, 1), noise(150, 90, 2)
    rows = llm.encode([a, b, a])
    assert len(encodes) == 2
    np.testing.assert_array_equal(rows[0], rows[2])
    out = llm.chat(user(a, "or", b, "or", a, "?"), PARAMS)
    assert len(encodes) == 2
    given = llm.chat(user(a, "or", b, "or", a, "?"), PARAMS, multi_modal_embeddings={"image": rows}, cache_salt="x")
    assert (len(encodes), given.metrics.items_encoded) == (2, 0)
    same(given, out)


def test_options_are_part_of_what_a_picture_is(llm, encodes):
    picture = noise(196, 196, 1)
    default = llm.encode([picture])[0]
    small = llm.encode([picture], mm_processor_kwargs={"max_pixels": 9800})[0]
    again = llm.encode([picture])[0]
    spelled = llm.encode([picture], mm_processor_kwargs={"min_pixels": 4 * 784, "max_pixels": 64 * 784})[0]
    assert (len(default), len(small), len(encodes)) == (49, 9, 2)
    np.testing.assert_array_equal(again, default)
    np.testing.assert_array_equal(spelled, default)


def test_rows_do_not_depend_on_their_batch(tiny_llm):
    pictures = [noise(84, 140, 1), noise(28, 196, 2), noise(56, 84, 3), noise(200, 200, 4)]
    counts: Counter[int] = Counter()
    with serving(tiny_llm(), budgets={"reuse_bytes": 0}) as llm:
        alone = [llm.encode([picture])[0] for picture in pictures]
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0], [2, 0, 3, 2, 1, 0, 1]):
            for index, rows in zip(order, llm.encode([pictures[i] for i in order]), strict=True):
                np.testing.assert_allclose(rows, alone[index], rtol=0, atol=tolerances.OTHER_LAYOUT)
                counts[index] += 1
    assert counts.total() == 18


# ---- pictures whose rows are there ----------------------------------------------------------------------------------


def test_a_picture_whose_rows_are_there_is_not_cut_again(llm, cuts):
    picture, other = noise(84, 140, 1), noise(56, 84, 2)
    first = llm.chat(user(picture, "what?"), PARAMS)
    again = llm.chat(user(picture, other, "what?"), PARAMS)
    assert cuts == [(84, 140, 3), (56, 84, 3)]
    assert (first.metrics.items_encoded, again.metrics.items_encoded, again.metrics.items_cached) == (1, 1, 1)
    llm.invalidate_caches()
    same(llm.chat(user(picture, other, "what?"), PARAMS), again)
    assert len(cuts) == 4


def test_rows_that_go_before_their_request_runs_are_made_again(llm, cuts, encodes, monkeypatch):
    messages = user("a", noise(84, 140, 1), noise(56, 84, 2), "what?")
    cold = llm.chat(messages, PARAMS)
    llm.invalidate_caches()
    monkeypatch.setattr(llm.running, "has_rows", lambda key: True)
    same(llm.chat(messages, PARAMS), cold)
    assert encodes[:2] == encodes[2:]
    assert len(encodes) == 4
    assert len(cuts) == 4
    assert_nothing_held(llm)
