# SPDX-License-Identifier: Apache-2.0
"""Claim: a clip in several runs, with its times in words between them, is chunked, cached and shared like any item."""

from __future__ import annotations

import numpy as np
import pytest
from llm_kit import clip, noise, serving, user
from test_chunks_and_caches import PARAMS, same

import mmjax

pytestmark = pytest.mark.timeout(300)

FRAMES = clip(6, 64, 96, 1)


@pytest.fixture
def llm(tiny_llm):
    with serving(tiny_llm("qwen3_vl")) as served:
        yield served


def film(fps: float, frames: np.ndarray = FRAMES) -> list[dict]:
    return user("what happens here, and when? ", (frames, {"fps": fps}), "say")


def test_the_judge_agrees(llm, tiny_reference):
    """Of pictures around two clips, with and without the template's vision tokens around each clip."""
    messages = user(noise(70, 90, 1), (FRAMES, {"fps": 3.0}), "or", (clip(3, 40, 64, 2), {}), noise(64, 64, 3), "what?")
    judge = tiny_reference("qwen3_vl")
    answers = []
    for options in ({}, {"nested_vision_tokens": False}):
        out, expected = (side.chat(messages, PARAMS, mm_processor_kwargs=options) for side in (llm, judge))
        assert out.prompt_token_ids == expected.prompt_token_ids
        assert out.token_ids == expected.token_ids
        answers.append(out)
    assert len(answers[0].prompt_token_ids) == len(answers[1].prompt_token_ids) + 4
    assert answers[1].metrics.items_encoded == 2  # the clips; the pictures' rows are those of the first prompt


def test_a_prompt_may_come_expanded_or_compact(llm):
    """The ids of transformers' processor, or one placeholder a clip in a text that the caller owns."""
    chat = llm.chat(film(3.0), PARAMS)
    media = {"video": [(FRAMES, {"fps": 3.0})]}
    text = "<|im_start|>user\nwhat happens here, and when? <|vision_start|><|video_pad|><|vision_end|>say<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    for prompt in (chat.prompt_token_ids, text):
        out = llm.generate(prompt, PARAMS, media)
        assert out.prompt_token_ids == chat.prompt_token_ids
        same(out, chat)


def test_a_prefix_may_end_anywhere_in_a_clip(llm, monkeypatch):
    """Pages of 16: hits that end in the words before a step, in its rows and between two steps."""
    messages = film(2.0)
    cold = llm.chat(messages, PARAMS)
    runs = llm.explain(messages).spans[0].runs
    pages, length = llm.running.pages, len(cold.prompt_token_ids)
    assert [rows for _, rows in runs] == [6, 6, 6]
    ends = []
    for hit in range(0, length - 1, 16):
        monkeypatch.setattr(
            pages,
            "match",
            lambda keys, tokens, limit, most=hit, match=pages.match: match(keys, tokens, min(limit, most)),
        )
        llm.running.call(llm.running.items.cache.clear)
        out = llm.chat(messages, PARAMS)
        monkeypatch.setattr(pages, "match", type(pages).match.__get__(pages))
        same(out, cold)
        assert out.metrics.prefix_tokens_reused == hit
        # Encoded again as long as one of its rows lies behind the prefix, however many came before.
        last = runs[-1][0] + runs[-1][1]
        assert out.metrics.items_encoded == (hit < last)
        ends.append(sum(position < hit for position, _ in runs))
    assert set(ends) >= {0, 1, 2}


def test_the_same_frames_at_another_rate_share_nothing(llm):
    """Not the pages from the clip on, as its times are other words; not its rows either, as the rate is part of it."""
    first, other, again = (llm.chat(film(fps), PARAMS) for fps in (3.0, 2.9, 3.0))
    start = llm.explain(film(3.0)).spans[0].runs[0][0]
    assert first.prompt_token_ids != other.prompt_token_ids
    assert other.usage.cached_tokens <= start
    assert other.metrics.items_encoded == 1
    assert again.usage.cached_tokens == (len(first.prompt_token_ids) - 1) // 16 * 16
    assert again.metrics.items_encoded == 0
    same(again, first)


def test_clips_that_differ_late_share_no_page_with_rows(llm):
    """The second clip's first steps look the same; a clip is one item, known by all of its frames."""
    changed = FRAMES.copy()
    changed[-1] ^= 255
    first, other = llm.chat(film(2.0), PARAMS), llm.chat(film(2.0, changed), PARAMS)
    start = llm.explain(film(2.0)).spans[0].runs[0][0]
    assert first.prompt_token_ids == other.prompt_token_ids
    assert other.usage.cached_tokens == start // 16 * 16 > 0


def test_a_clip_waits_for_its_rows_and_not_for_its_words(tiny_llm):
    """A chunk may end in front of the first row; what is said before it does not need the tower."""
    messages = film(2.0)
    with serving(tiny_llm("qwen3_vl")) as llm:
        cold = llm.chat(messages, PARAMS)
        first_row = llm.explain(messages).spans[0].runs[0][0]
    for chunk in (first_row - 1, first_row, first_row + 1):
        with serving(tiny_llm("qwen3_vl"), chunk_tokens=chunk, enable_block_reuse=False, trace=50) as llm:
            same(llm.chat(messages, PARAMS), cold)
            first = llm.trace.rows[0]
            assert [(begin, end) for _, begin, end in first.chunks] == [(0, chunk)]
            assert len(first.items) + first.hits == (chunk > first_row)


def test_a_prompt_is_never_cut_inside_a_clip(llm):
    """Truncation drops the clip whole, its words and vision tokens included."""
    messages = [*film(2.0), *user("b" * 460)]
    whole = llm.explain(film(2.0)).usage.prompt_tokens
    out = llm.chat(messages, mmjax.SamplingParams(max_tokens=2), truncate="left")
    text = llm.frontend.model.tokenizer.decode(out.prompt_token_ids)
    assert "seconds" not in text
    assert "<|vision_end|>" not in text
    assert "say<|im_end|>" in text  # what stood behind it is still there
    assert out.usage.video_tokens == 0
    assert len(out.prompt_token_ids) < llm.running.max_seq_len < whole + 460
