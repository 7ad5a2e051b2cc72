# SPDX-License-Identifier: Apache-2.0
"""Claim: compact and expanded prompts are told apart, and nothing in between passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs_kit import (
    PAD,
    SENTINEL,
    VIDEO_PAD,
    ToyProcessor,
    block,
    broken_rows,
    clip,
    item_of,
    plan_of,
    timed_steps,
)

from mmjax.errors import PlaceholderError, RequestError
from mmjax.inputs.items import Modality
from mmjax.inputs.prepare import prepare_prompt
from mmjax.inputs.prompt_forms import compact_prompt

TOY = ToyProcessor()
IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO


def forms(ids, plans):
    compact, order = compact_prompt(ids, plans, TOY)
    return compact.tolist(), order


def test_compact_prompts_come_back():
    plans = {IMAGE: [block(3), block(2)], VIDEO: [clip(4)]}
    ids = [1, PAD, 2, VIDEO_PAD, PAD]
    assert forms(ids, plans) == (ids, [(IMAGE, 0), (VIDEO, 0), (IMAGE, 1)])
    assert forms([1, 2], {}) == ([1, 2], [])
    assert forms([1, 2], {IMAGE: []}) == ([1, 2], [])


@pytest.mark.parametrize(
    ("ids", "plans", "compact"),
    [
        ([1, *[PAD] * 3, 2], {IMAGE: [block(3)]}, [1, PAD, 2]),
        ([*[PAD] * 3, *[PAD] * 2], {IMAGE: [block(3), block(2)]}, [PAD, PAD]),
        ([1, *[VIDEO_PAD] * 4, 2, *[PAD] * 3], {IMAGE: [block(3)], VIDEO: [clip(4)]}, [1, VIDEO_PAD, 2, PAD]),
        ([1, *broken_rows(2, 3).span_ids, 2], {IMAGE: [broken_rows(2, 3)]}, [1, PAD, 2]),
        ([5, *timed_steps(3, 2).span_ids, 2], {VIDEO: [timed_steps(3, 2)]}, [5, VIDEO_PAD, 2]),
        ([1, *[SENTINEL] * 3, 2], {IMAGE: [plan_of([SENTINEL] * 3)]}, [1, PAD, 2]),
    ],
)
def test_expanded_prompts_are_collapsed(ids, plans, compact):
    assert forms(ids, plans)[0] == compact


def prepared(prompt, absorbs):
    plans = {VIDEO_PAD: replace(timed_steps(2, 3), absorbs=absorbs), PAD: block(3)}
    items = [item_of(plans[token]) for token in prompt if token in plans]
    return prepare_prompt(np.array(prompt), items, TOY, vocab_size=100)


@pytest.mark.parametrize(
    ("ids", "without"),
    [
        ([1, 95, VIDEO_PAD, 96, 2], [1, VIDEO_PAD, 2]),
        ([95, VIDEO_PAD, 96, 95, VIDEO_PAD, 96], [VIDEO_PAD, VIDEO_PAD]),
        ([95, 95, VIDEO_PAD, 96, 96], [95, VIDEO_PAD, 96]),
        ([95, VIDEO_PAD, 2], [95, VIDEO_PAD, 2]),  # half a pair is not one
        ([VIDEO_PAD, 96], [VIDEO_PAD, 96]),
        ([VIDEO_PAD, 96, 95], [VIDEO_PAD, 96, 95]),  # the prompt's end does not stand in front of its start
        ([95, VIDEO_PAD], [95, VIDEO_PAD]),
        ([96, VIDEO_PAD, 95], [96, VIDEO_PAD, 95]),
        ([95, PAD, 96, 95, VIDEO_PAD, 96], [95, PAD, 96, VIDEO_PAD]),  # the picture keeps its own
    ],
)
def test_a_span_may_stand_for_the_tokens_around_its_placeholder(ids, without):
    absorbed, plain = prepared(ids, (95, 96)), prepared(without, None)
    assert absorbed.token_ids.tolist() == plain.token_ids.tolist()
    assert [item.runs for item in absorbed.items] == [item.runs for item in plain.items]


def test_a_token_between_two_placeholders_goes_once():
    ids = prepared([95, VIDEO_PAD, 95, VIDEO_PAD, 95], (95, 95)).token_ids
    assert ids.tolist() == prepared([VIDEO_PAD, VIDEO_PAD, 95], None).token_ids.tolist()


def test_spans_do_not_share_tokens():
    """What would be the end of one span and the start of the next is text between two placeholders."""
    plans = {VIDEO: [plan_of([VIDEO_PAD, 7], [True, False], VIDEO), plan_of([7, VIDEO_PAD], [False, True], VIDEO)]}
    ids, order = [VIDEO_PAD, 7, VIDEO_PAD], [(VIDEO, 0), (VIDEO, 1)]
    assert forms(ids, plans) == (ids, order)
    assert forms([VIDEO_PAD, 7, 7, VIDEO_PAD], plans) == ([VIDEO_PAD, VIDEO_PAD], order)


def test_one_row_is_both():
    assert forms([1, PAD, 2], {IMAGE: [block(1)]}) == ([1, PAD, 2], [(IMAGE, 0)])


def test_one_row_with_its_end_is_expanded():
    """As many placeholders as items in both forms: the rest of the span decides."""
    plans = {IMAGE: [broken_rows(1, 1), broken_rows(1, 1)]}
    span = broken_rows(1, 1).span_ids.tolist()
    assert len(span) == 2
    order = [(IMAGE, 0), (IMAGE, 1)]
    assert forms([1, *span, *span, 2], plans) == ([1, PAD, PAD, 2], order)
    assert forms([1, PAD, 5, PAD, 2], plans) == ([1, PAD, 5, PAD, 2], order)


@pytest.mark.parametrize(
    ("ids", "plans", "message"),
    [
        ([1, PAD, PAD, PAD], {IMAGE: [block(5)]}, "holds 3 image placeholders for 1 items; expected 1, .* 5 in all"),
        ([1, 2], {IMAGE: [block(5)]}, "holds 0 image placeholders for 1 items"),
        ([1, PAD], {}, "holds 1 image placeholders for 0 items"),
        ([PAD], {IMAGE: [block(2), block(3)]}, "holds 1 image placeholders for 2 items; expected 2, .* 5 in all"),
        ([PAD] * 4 + [1] + [PAD], {IMAGE: [block(3), block(2)]}, "holds 5 image placeholders for 2 items"),
        ([PAD, VIDEO_PAD, VIDEO_PAD], {IMAGE: [block(2)]}, "holds 2 video placeholders for 0 items"),
        ([*[PAD] * 3, 1, PAD], {IMAGE: [block(3)]}, "holds 4 image placeholders for 1 items"),
        ([7, *[VIDEO_PAD] * 2], {VIDEO: [timed_steps(1, 2)]}, "holds 2 video placeholders for 1 items"),
    ],
)
def test_other_counts_are_refused_with_both_numbers(ids, plans, message):
    with pytest.raises(PlaceholderError, match=message):
        compact_prompt(ids, plans, TOY)


@pytest.mark.parametrize(("slots", "images"), [(3, 1), (0, 1), (1, 0), (1, 2)])
@pytest.mark.parametrize("modality", [IMAGE, VIDEO])
def test_slots_and_items_must_agree_in_every_door(slots, images, modality):
    plans = [block(7) if modality is IMAGE else clip(7)] * images
    ids = np.array([1, *[TOY.placeholder_id[modality]] * slots, 2], np.int32)
    counts = f"holds {slots} {modality} placeholders for {images}"
    with pytest.raises(PlaceholderError, match=counts):
        compact_prompt(ids, {modality: plans}, TOY)
    with pytest.raises(PlaceholderError, match=counts):
        prepare_prompt(ids, [item_of(plan) for plan in plans], TOY, vocab_size=TOY.vocab)


def test_modalities_the_model_does_not_take():
    with pytest.raises(RequestError, match="takes no audio"):
        compact_prompt([1], {AUDIO: [plan_of([1], modality=AUDIO)]}, TOY)


def test_prompts_are_flat():
    with pytest.raises(RequestError, match="one list of token ids"):
        compact_prompt([[1, 2]], {}, TOY)


IN_VOCABULARY = st.sampled_from([block(1), block(2), block(3), broken_rows(2, 2), clip(2), timed_steps(2, 2)])
BEYOND = st.sampled_from([plan_of([SENTINEL] * rows) for rows in (1, 2, 3)])
TEXTS = st.lists(st.integers(1, 6), max_size=3)


@given(
    st.sampled_from([IN_VOCABULARY, BEYOND]).flatmap(lambda spans: st.lists(st.tuples(TEXTS, spans), max_size=5)),
    TEXTS,
)
def test_both_forms_of_a_prompt_are_the_same_prompt(parts, tail):
    """Text between the items never is what a span begins with, so the expanded form has one reading."""
    plans, compact, expanded, order = {}, [], [], []
    for text, plan in parts:
        order.append((plan.modality, len(plans.setdefault(plan.modality, []))))
        plans[plan.modality].append(plan)
        compact += [*text, TOY.placeholder_id[plan.modality]]
        expanded += [*text, *plan.span_ids.tolist()]
    assert forms(compact + tail, plans) == (compact + tail, order)
    assert forms(expanded + tail, plans) == (compact + tail, order)
    items = [item_of(plans[modality][index]) for modality, index in order]
    prepared = prepare_prompt(np.array(compact + tail, np.int32), items, TOY, vocab_size=TOY.vocab)
    assert prepared.token_ids.tolist() == expanded + tail
