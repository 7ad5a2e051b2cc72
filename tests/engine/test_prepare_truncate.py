# SPDX-License-Identifier: Apache-2.0
"""Claim: no limit and no side ever cuts an item; whole items go, with the tokens around them, and are reported."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs_kit import (
    END_WRAP,
    PAD,
    START_WRAP,
    VIDEO_PAD,
    ToyProcessor,
    block,
    broken_rows,
    clip,
    item_of,
    timed_steps,
)

from mmjax.errors import ConfigError, PromptTooLongError
from mmjax.inputs.items import Modality
from mmjax.inputs.prepare import prepare_prompt

TOY = ToyProcessor()


def fit(ids, items, limit, side):
    return prepare_prompt(np.array(ids, np.int32), items, TOY, vocab_size=TOY.vocab, limit=limit, truncate=side)


def spans_are_whole(prompt) -> bool:
    whole = all(np.array_equal(prompt.token_ids[item.start : item.end], item.plan.span_ids) for item in prompt.items)
    return whole and prompt.embed_mask.sum() == sum(item.plan.rows for item in prompt.items)


TEXT = [*range(1, 11), PAD, *range(11, 25)]  # expands to 30 with the span [10, 16)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", range(1, 31))
def test_every_limit_leaves_whole_spans(limit, side):
    prompt = fit(TEXT, [item_of(block(6))], limit, side)
    assert 0 < prompt.token_ids.size <= limit
    assert spans_are_whole(prompt)
    kept = limit >= 16 if side == "right" else limit >= 20
    assert len(prompt.items) == kept
    full = fit(TEXT, [item_of(block(6))], 30, None).token_ids.tolist()
    cut = prompt.token_ids.tolist()
    assert cut == (full[: len(cut)] if side == "right" else full[-len(cut) :])
    if limit == 30:
        assert prompt.truncation is None
        return
    assert (prompt.truncation.needed_tokens, prompt.truncation.kept_tokens) == (30, len(cut))
    assert prompt.truncation.dropped_items == (() if kept else ((0, Modality.IMAGE),))
    lost = {"right": range(10, 16), "left": range(14, 20)}[side]
    assert len(cut) == limit if limit not in lost else len(cut) == lost[0], "text goes token by token"


@pytest.mark.parametrize("limit", range(1, 30))
def test_refusal_is_the_default(limit):
    with pytest.raises(PromptTooLongError, match=f"needs 30 tokens, the limit is {limit}"):
        fit(TEXT, [item_of(block(6))], limit, None)


def test_wrappers_go_with_their_item():
    wrapped = [1, 2, START_WRAP, PAD, END_WRAP, 3, 4]
    for limit in range(2, 7):
        assert fit(wrapped, [item_of(block(4))], limit, "right").token_ids.tolist() == [1, 2]
        assert fit(wrapped, [item_of(block(4))], limit, "left").token_ids.tolist() == [3, 4]
    assert len(fit(wrapped, [item_of(block(4))], 8, "right").items) == 1


def test_neighbours_share_out_the_wrappers_between_them():
    ids = [1, START_WRAP, PAD, END_WRAP, START_WRAP, PAD, END_WRAP, 2]
    items = [item_of(block(2)), item_of(block(3))]
    assert fit(ids, items, 9, "right").token_ids.tolist() == [1, START_WRAP, PAD, PAD, END_WRAP]
    assert fit(ids, items, 9, "left").token_ids.tolist() == [START_WRAP, PAD, PAD, PAD, END_WRAP, 2]


def test_items_that_stay_keep_their_identity():
    items = [item_of(block(2), "aa" * 32), item_of(clip(3), "bb" * 32), item_of(block(2), "cc" * 32)]
    prompt = fit([PAD, 1, VIDEO_PAD, 1, PAD], items, 7, "left")
    assert [item.index for item in prompt.items] == [0, 1]
    assert [item.modality for item in prompt.items] == ["video", "image"]
    assert prompt.items[1].digest == tuple(np.frombuffer(b"\xcc" * 32, ">i4").tolist())
    assert prompt.truncation.dropped_items == ((0, Modality.IMAGE),)
    assert prompt.warnings == ["truncated from the left: 9 to 7 tokens, dropped image 0"]


def test_nothing_left_is_an_error():
    with pytest.raises(PromptTooLongError, match="nothing whole of it fits a limit of 3"):
        fit([PAD, 1], [item_of(block(6))], 3, "right")
    with pytest.raises(PromptTooLongError, match="nothing whole"):
        fit([1, 2], [], 0, "left")


def test_unknown_sides_are_refused():
    with pytest.raises(ConfigError, match="'middle'"):
        fit([1, 2], [], 1, "middle")


PLANS = [block(1), block(5), broken_rows(2, 2), clip(3), timed_steps(2, 2)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(PLANS)), max_size=4),
    st.booleans(),
    st.integers(0, 4),
    st.data(),
)
def test_any_prompt_any_limit(parts, wrap, tail, data):
    ids = []
    for texts, plan in parts:
        slot = PAD if plan.modality is Modality.IMAGE else VIDEO_PAD
        ids += [1] * texts + ([START_WRAP, slot, END_WRAP] if wrap else [slot])
    ids += [2] * tail
    items = [item_of(plan, f"{index:064x}") for index, (_, plan) in enumerate(parts)]
    full = fit(ids, items, None, None)
    limit = data.draw(st.integers(0, full.token_ids.size))
    side = data.draw(st.sampled_from(["left", "right"]))
    try:
        prompt = fit(ids, items, limit, side)
    except PromptTooLongError:
        return
    assert prompt.token_ids.size <= limit
    assert spans_are_whole(prompt)
    wrappers = [token for token in prompt.token_ids.tolist() if token in (START_WRAP, END_WRAP)]
    assert wrappers[::2] == [START_WRAP] * (len(wrappers) // 2)
    assert wrappers[1::2] == [END_WRAP] * (len(wrappers) // 2)
    digests = [item.digest for item in full.items]
    kept = [item.digest for item in prompt.items]
    ends = digests[: len(kept)] if side == "right" else digests[len(digests) - len(kept) :]
    assert kept == ends
    dropped = 0 if prompt.truncation is None else len(prompt.truncation.dropped_items)
    assert dropped + len(kept) == len(items)
