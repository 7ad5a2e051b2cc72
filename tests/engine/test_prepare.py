# SPDX-License-Identifier: Apache-2.0
"""Claim: a prepared prompt says of every position whose it is, which row it takes, and under what name it is cached."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs_kit import (
    BREAK,
    END,
    PAD,
    SENTINEL,
    VIDEO_PAD,
    ToyProcessor,
    block,
    broken_rows,
    clip,
    item_of,
    learned_rows,
    plan_of,
    timed_steps,
)

from mmjax.errors import EngineError, PlaceholderError
from mmjax.inputs.hashing import hexdigest_to_int32, mm_processor_kwargs_hash
from mmjax.inputs.items import Modality
from mmjax.inputs.masks import compute_mm_masks
from mmjax.inputs.params import MULTIMODAL_ENCODER_ITEM_METADATA_KEY
from mmjax.inputs.prepare import prepare_prompt

TOY = ToyProcessor()
ID_OF = {Modality.IMAGE: PAD, Modality.VIDEO: VIDEO_PAD}


def prepare(ids, items, processor=TOY, **options):
    return prepare_prompt(np.array(ids, np.int32), items, processor, vocab_size=TOY.vocab, **options)


def test_an_image_between_texts():
    prompt = prepare([1, 2, PAD, 3], [item_of(block(3))])
    assert prompt.token_ids.tolist() == [1, 2, PAD, PAD, PAD, 3]
    assert prompt.token_ids.dtype == prompt.positions.dtype == np.int32
    assert prompt.cumsum.tolist() == [0, 0, 1, 2, 3, 3]
    (item,) = prompt.items
    assert (item.start, item.end, item.runs, item.length) == (2, 5, [(2, 3)], 3)
    assert item.row_positions.tolist() == [2, 3, 4]
    assert item.digest == tuple([0] * 8)
    assert item.cache_key == ("image", item.digest, 3, mm_processor_kwargs_hash({}))


def test_text_alone_has_no_items():
    prompt = prepare([1, 2, 3], [])
    assert prompt.items == []
    assert prompt.multimodal_input is None
    assert prompt.reusable
    assert not prompt.embed_mask.any()
    assert prompt.key_tokens() == [1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "columns", "span", "features", "breaks", "end"),
    [(2, 4, 10, 8, [4], 9), (4, 2, 12, 8, [2, 5, 8], 11)],
)
def test_row_breaks_are_positions_but_not_rows(rows, columns, span, features, breaks, end):
    """64 x 32 and 32 x 64 pixels in patches of 16, width first."""
    prompt = prepare([1, PAD, 2], [item_of(broken_rows(rows, columns))])
    (item,) = prompt.items
    ids = prompt.token_ids[item.start : item.end].tolist()
    assert (item.length, item.plan.rows, len(ids)) == (span, features, span)
    assert [index for index, token in enumerate(ids) if token == BREAK] == breaks
    assert [index for index, token in enumerate(ids) if token == END] == [end]
    assert (prompt.mm_mask.sum(), prompt.embed_mask.sum()) == (span, features)
    for cut in range(prompt.token_ids.size + 1):
        first = prompt.runtime(0, cut).num_mm_tokens_in_chunk
        rest = prompt.runtime(cut, prompt.token_ids.size).num_mm_tokens_in_chunk
        assert first == sum(position < cut for position in item.row_positions)
        assert first + rest == features


@pytest.mark.parametrize(("rows", "columns", "span"), [(2, 3, 10), (3, 2, 11)])
def test_learned_breaks_are_rows(rows, columns, span):
    prompt = prepare([PAD], [item_of(learned_rows(rows, columns))])
    np.testing.assert_array_equal(prompt.mm_mask, prompt.embed_mask)
    assert prompt.embed_mask.sum() == prompt.items[0].plan.rows == span


def test_time_stamps_inside_a_clip_are_text():
    prompt = prepare([1, VIDEO_PAD, 2], [item_of(timed_steps(2, 3))])
    (item,) = prompt.items
    assert (item.start, item.end, item.runs, item.length) == (1, 11, [(3, 3), (8, 3)], 6)
    assert prompt.multimodal_input.multimodal_positions == [3]
    assert prompt.multimodal_input.multimodal_run_positions == [3, 8]
    assert (prompt.usage.text_tokens, prompt.usage.video_tokens) == (6, 6)
    assert prompt.key_tokens()[1:3] == [7, 8]


def test_ids_beyond_the_vocabulary():
    prompt = prepare([1, PAD, 2], [item_of(plan_of([SENTINEL] * 3))])
    assert prompt.token_ids.tolist() == [1, SENTINEL, SENTINEL, SENTINEL, 2]
    assert prompt.embed_mask.tolist() == [False, True, True, True, False]


def test_chunks_of_an_image_between_texts():
    """8 text, 6 rows, 8 text, chunks of 4: rows 0, 0, 4, 2, 0, 0."""
    prompt = prepare([*range(1, 9), PAD, *range(1, 9)], [item_of(block(6))])
    assert [prompt.runtime(p, min(p + 4, 22)).num_mm_tokens_in_chunk for p in range(0, 22, 4)] == [0, 0, 4, 2, 0, 0]
    for size in range(1, 23):
        chunks = [prompt.runtime(p, min(p + size, 22)) for p in range(0, 22, size)]
        assert sum(chunk.num_mm_tokens_in_chunk for chunk in chunks) == 6


# --- disagreements ---


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of([PAD] * 3, rows=4), "item 0: 3 prompt positions for 4 embedding rows"),
        (plan_of([PAD, PAD], [False, False], rows=0), "item 0: 0 prompt positions for 0 embedding rows"),
        (replace(block(3), span_embed=np.ones(2, bool)), "item 0: 3 span ids but 2 flags"),
        (
            plan_of([SENTINEL, SENTINEL], [True, False]),
            f"item 0: id {SENTINEL} of its span takes no row and lies outside the vocabulary of {TOY.vocab}",
        ),
    ],
)
def test_positions_and_rows_must_agree(plan, message):
    with pytest.raises(PlaceholderError, match=message):
        prepare([1, PAD], [item_of(plan)])


def test_supplied_rows_must_fill_the_positions():
    with pytest.raises(PlaceholderError, match="item 0: 2 supplied rows for 3 positions"):
        prepare([PAD], [item_of(block(3), embedding=np.zeros((2, 4), np.float32))])


def test_kinds_must_stand_in_their_own_placeholders():
    with pytest.raises(PlaceholderError, match="item 0: its placeholder stands for video, the item is image"):
        prepare([VIDEO_PAD, PAD], [item_of(block(2)), item_of(clip(2))])


def test_a_family_with_positions_of_another_length_is_an_engine_error():
    class Wrong(ToyProcessor):
        def positions(self, token_ids, spans):
            return np.zeros((1, 3), np.int32), 0

    with pytest.raises(EngineError, match="for 2 tokens"):
        prepare([1, 2], [], Wrong())


# --- identity ---

A, B = "aa" * 32, "bb" * 32


def test_position_and_neighbours_are_not_part_of_a_cache_key():
    first, second, third = prepare(
        [PAD, 1, PAD, PAD], [item_of(block(2), A), item_of(block(2), B), item_of(block(2), A)]
    ).items
    assert first.cache_key == third.cache_key != second.cache_key
    assert prepare([5, 5, PAD], [item_of(block(2), A)]).items[0].cache_key == first.cache_key


def test_options_rows_and_kind_are_part_of_a_cache_key():
    items = [
        item_of(block(2), A),
        item_of(block(3), A),
        item_of(block(2, options={"max_pixels": 9}), A),
        item_of(block(2, options={"max_pixels": 9, "fps": None}), A),
        item_of(plan_of([PAD] * 2, grid=(1, 4, 2)), A, embedding=np.zeros((2, 4), np.float32)),
        item_of(plan_of([PAD] * 2, grid=(1, 2, 4)), A, embedding=np.zeros((2, 4), np.float32)),
    ]
    keys = [item.cache_key for item in prepare([PAD] * len(items), items).items]
    assert len(set(keys)) == len(keys)
    spelled = prepare([PAD], [item_of(block(2, options={"fps": None, "max_pixels": 9}), A)]).items[0]
    assert spelled.cache_key == keys[3]


def shared(one, other, size=4) -> int:
    return sum(a == b for a, b in zip(one.block_keys(size), other.block_keys(size), strict=True))


def test_prefix_blocks_depend_on_items_from_their_start_on():
    ids = [*range(1, 9), PAD, *range(1, 7)]
    base = prepare(ids, [item_of(block(6), A)])
    assert shared(base, prepare(ids, [item_of(block(6), A)])) == 5
    assert shared(base, prepare(ids, [item_of(block(6), B)])) == 2
    assert shared(base, prepare(ids, [item_of(block(6, options={"x": 1}), A)])) == 2
    assert shared(base, prepare(ids, [item_of(block(6), A)], salt="tenant")) == 0
    named = prepare(ids, [item_of(block(6), A, uuid="u")])
    assert shared(base, named) == 5, "a name is already part of the digest"
    assert named.multimodal_input.multimodal_uuids == ["u"]


def test_items_without_identity_share_nothing():
    ids = [1, 2, 3, 4, PAD, 5, 6]
    for item in (item_of(block(6), None), item_of(block(6, options={"f": object()}), A)):
        one, other = prepare(ids, [item]), prepare(ids, [item])
        assert not one.reusable
        assert one.multimodal_input is None
        assert one.items[0].cache_key is None
        assert shared(one, other) == 0
        assert one.block_keys(4) == one.block_keys(4)


def test_slices_of_key_tokens_are_slices():
    prompt = prepare([1, 2, VIDEO_PAD, 3, PAD, 4], [item_of(timed_steps(2, 2), A), item_of(broken_rows(2, 2), B)])
    whole = prompt.key_tokens()
    assert len(whole) == prompt.token_ids.size
    for start in range(len(whole)):
        for end in range(start, len(whole) + 1):
            assert prompt.key_tokens(start, end) == whole[start:end]


# --- what else travels ---


def test_item_metadata_and_params():
    items = [item_of(clip(2), A), item_of(broken_rows(2, 2), B), item_of(clip(1), A)]
    prompt = prepare([VIDEO_PAD, 1, PAD, VIDEO_PAD], items, ToyProcessor(axes=3))
    params = prompt.multimodal_params(0, 4)
    metadata = params.multimodal_data[MULTIMODAL_ENCODER_ITEM_METADATA_KEY]
    assert metadata.item_refs == [("video", 0), ("image", 0), ("video", 1)]
    assert metadata.encoder_token_lengths == [8, 16, 4]
    assert params.multimodal_data["multimodal_embedding_lengths"] == [2, 4, 1]
    assert params.multimodal_data["special_token_offsets"] == [4, 7]
    assert [len(params.multimodal_data[name]["pixel_values"]) for name in ("image", "video")] == [1, 2]
    assert params.multimodal_data["mrope_config"]["mrope_position_ids"].shape == (3, 1, prompt.token_ids.size)
    assert params.multimodal_runtime.num_mm_tokens_in_chunk == 3
    assert params.mm_item_order[2] == {"modality": "video", "index": 1, "placeholder": None}
    assert params.multimodal_input.multimodal_hashes[1] == hexdigest_to_int32(B)
    assert params.multimodal_input.multimodal_lengths == [2, 6, 1]


def test_text_params_are_empty():
    params = prepare([1, 2], []).multimodal_params()
    assert not params.has_content()
    assert params.multimodal_runtime is None


def test_plans_alone_can_be_prepared():
    planned = prepare([1, PAD], [replace(item_of(block(3), None), patches=None)])
    assert planned.usage.image_tokens == 3
    assert planned.items[0].patches is None


def test_warnings_name_their_item():
    prompt = prepare([PAD, PAD], [item_of(block(1)), item_of(block(1, warnings=("small",)))])
    assert prompt.warnings == ["item 1: small"]


PLANS = [block(1), block(3), broken_rows(2, 2), learned_rows(1, 2), clip(2), timed_steps(2, 2), plan_of([SENTINEL] * 2)]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(PLANS)), max_size=6), st.integers(0, 3))
def test_invariants_of_any_prompt(parts, tail):
    ids = []
    for texts, plan in parts:
        ids += [1] * texts + [ID_OF[plan.modality]]
    prompt = prepare(ids + [1] * tail, [item_of(plan) for _, plan in parts])
    size = prompt.token_ids.size
    assert prompt.positions.shape == (1, size)
    assert prompt.usage.prompt_tokens == size
    assert (prompt.mm_mask >= prompt.embed_mask).all()
    rows = [position for item in prompt.items for position in item.row_positions.tolist()]
    assert rows == np.flatnonzero(prompt.embed_mask).tolist()
    covered = [p for item in prompt.items for start, length in item.runs for p in range(start, start + length)]
    assert covered == np.flatnonzero(prompt.mm_mask).tolist()
    by_id = compute_mm_masks(prompt.token_ids, None, [PAD, VIDEO_PAD, SENTINEL], TOY.special_ids)
    np.testing.assert_array_equal(by_id[0], prompt.mm_mask)
    np.testing.assert_array_equal(by_id[1], prompt.embed_mask)
    for before, after in zip(prompt.items, prompt.items[1:], strict=False):
        assert before.end <= after.start
    if size:
        assert prompt.cumsum[-1] == sum(item.plan.rows for item in prompt.items)
