# SPDX-License-Identifier: Apache-2.0
"""Claim: a clip that is cut for the encoder loses nothing: no row, no position, and neither its pixels nor its name."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from llm_kit import assert_nothing_held, clip, noise, serving, together, user
from test_preemption import LONG, NO_REUSE, preempt_at

from mmjax.errors import RequestError
from mmjax.frontend import InputOptions
from mmjax.inputs.items import Modality
from mmjax.inputs.parts import in_parts, join_rows
from mmjax.inputs.process import patches_again
from mmjax.media import ClipSource

FILM, SHORT = (clip(5, 64, 96, 1), {"fps": 2.0}), (clip(2, 64, 64, 2), {"fps": 2.0})
MESSAGES = user("see ", noise(64, 96), "and ", FILM, "or ", SHORT, "?")


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def whole(tiny_reference, request):
    """A prompt, and the processor of its model."""
    llm = tiny_reference(request.param)
    return llm.frontend.chat(MESSAGES, InputOptions(), limit=None), llm.model.processor


def step_tokens(prompt) -> int:
    return prompt.items[1].plan.contexts[0]


@pytest.mark.parametrize("steps", [1, 2])
def test_parts_make_up_the_clip(whole, steps):
    prompt, processor = whole
    cut = in_parts(prompt, lambda plan: plan.encoder_tokens <= steps * step_tokens(prompt))
    parts, clip_item = [item for item in cut.items if item.number == 1], prompt.items[1]
    assert [item.index for item in cut.items] == list(range(len(cut.items)))
    assert [item.number for item in cut.items] == [0, *[1] * len(parts), 2]
    assert [part.plan.grid[0] for part in parts] == {1: [1, 1, 1], 2: [2, 1]}[steps]
    for joined, known in (
        (np.concatenate([part.patches for part in parts]), clip_item.patches),
        (np.concatenate([part.row_positions for part in parts]), clip_item.row_positions),
        (np.concatenate([part.plan.span_ids for part in parts]), clip_item.plan.span_ids),
        (np.concatenate([part.plan.span_embed for part in parts]), clip_item.plan.span_embed),
    ):
        np.testing.assert_array_equal(joined, known)
    assert all(left.end == right.start for left, right in pairwise(parts))
    assert sum((part.plan.contexts for part in parts), ()) == clip_item.plan.contexts
    assert sum(part.plan.windows for part in parts) == clip_item.plan.windows
    for part in parts:
        assert part.plan.rows == len(part.row_positions) == np.count_nonzero(part.plan.span_embed)
    for part, again in zip(parts, patches_again(parts, processor), strict=True):
        np.testing.assert_array_equal(again, part.patches)
    assert len({part.cache_key for part in parts} | {item.cache_key for item in prompt.items}) == len(parts) + 3
    assert (cut.usage, cut.warnings) == (prompt.usage, prompt.warnings)
    assert cut.block_keys(16) == prompt.block_keys(16)
    rows = [np.full((item.plan.rows, 1), item.number) for item in cut.items]
    assert [np.unique(group).tolist() for group in join_rows(cut, rows)] == [[0], [1], [2]]
    assert [len(group) for group in join_rows(cut, rows)] == [item.plan.rows for item in prompt.items]


def test_what_fits_or_can_not_be_cut_stays_whole(whole):
    prompt, _ = whole
    assert in_parts(prompt, lambda plan: True) is prompt
    cut = in_parts(prompt, lambda plan: False)
    assert [item.plan for item in cut.items] == [item.plan for item in prompt.items]
    pictures = in_parts(prompt, lambda plan: plan.modality is Modality.VIDEO)
    assert [item.cache_key for item in pictures.items] == [item.cache_key for item in prompt.items]


def test_preempted_clips_are_decoded_and_cut_again(tiny_llm):
    requests = [user((clip(6, 64, 96, seed), {"fps": 2.0}), "what?") for seed in range(3)]
    with serving(tiny_llm()) as llm:
        alone = [llm.chat(messages, LONG).token_ids for messages in requests]
        grid = llm.explain(requests[0]).spans[0].grid
    budgets = NO_REUSE["budgets"] | {"max_num_tokens": grid[1] * grid[2]}
    with serving(tiny_llm(), block_limit=9, **NO_REUSE | {"budgets": budgets}) as llm:
        with together(llm):
            handles = [llm.submit(messages, LONG) for messages in requests]
        outs = [handle.result() for handle in handles]
        assert llm.stats().queues["preemptions"] > 0
        assert_nothing_held(llm)
    assert [out.token_ids for out in outs] == alone
    assert max(out.metrics.items_encoded for out in outs) > 3


def test_a_cut_clip_is_decoded_again_once(tiny_llm, monkeypatch):
    """Not once a part: each time brings the pixels of the whole clip."""
    messages = user(FILM, "and", SHORT, "what?")
    with serving(tiny_llm()) as llm:
        expected = llm.chat(messages, LONG).token_ids
        tokens = llm.frontend.chat(messages, InputOptions(), limit=None).items[0].plan.contexts[0]
    with serving(tiny_llm(), **NO_REUSE | {"budgets": NO_REUSE["budgets"] | {"max_num_tokens": tokens}}) as llm:
        decoded, decode = [], ClipSource.decode
        preempt_at(llm, monkeypatch, {12})
        handle = llm.submit(messages, LONG)
        monkeypatch.setattr(ClipSource, "decode", lambda clip, *a: decoded.append(clip.item) or decode(clip, *a))
        assert handle.result().token_ids == expected
    assert decoded == [0, 1]


def test_an_item_that_never_fits_is_refused_by_its_number(tiny_llm):
    """Behind a clip in three parts, a clip of which one step is too large."""
    messages = user(FILM, (clip(2, 128, 256, 2), {"fps": 2.0}), "what?")
    with serving(tiny_llm()) as llm:
        tokens = llm.frontend.chat(messages, InputOptions(), limit=None).items[0].plan.contexts[0]
    with (
        serving(tiny_llm(), budgets={"max_num_tokens": tokens}) as llm,
        pytest.raises(RequestError, match="encoder tokens for item 1") as caught,
    ):
        llm.chat(messages, LONG)
    assert caught.value.item == 1


def test_an_item_behind_a_cut_clip_keeps_its_number(tiny_llm, monkeypatch):
    """Its pixels are needed once more, and can't be had."""
    messages = user(FILM, noise(64, 96), "what?")
    with serving(tiny_llm()) as llm:
        tokens = llm.frontend.chat(messages, InputOptions(), limit=None).items[0].plan.contexts[0]
    with serving(tiny_llm(), **NO_REUSE | {"budgets": NO_REUSE["budgets"] | {"max_num_tokens": tokens}}) as llm:
        pixels = llm.running.engine.pixels

        def restore(items, original=pixels.restore):
            if items[0].modality is Modality.IMAGE:
                raise RuntimeError("gone")
            return original(items)

        monkeypatch.setattr(pixels, "restore", restore)
        preempt_at(llm, monkeypatch, {12})
        with pytest.raises(RequestError, match="can't be decoded again") as caught:
            llm.chat(messages, LONG)
        assert caught.value.item == 1
