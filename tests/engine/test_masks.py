# SPDX-License-Identifier: Apache-2.0
"""Claim: masks, starts, runs and row counts are those of TensorRT-LLM, and agree with each other on any prompt."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.errors import PlaceholderError
from mmjax.inputs.masks import (
    compute_mm_masks,
    find_mm_embedding_lengths_from_masks,
    find_mm_token_runs_from_mask,
    find_mm_token_start_pos_from_masks,
    maybe_compute_mm_embed_cumsum,
    mm_embed_cumsum,
    validate_mm_inputs,
)


def bools(text: str) -> np.ndarray:
    return np.array([letter == "T" for letter in text.split()])


def cumsum_of(ids, **kwargs) -> list[int]:
    return mm_embed_cumsum(compute_mm_masks(np.array(ids), **kwargs)[1]).tolist()


def starts_of(ids, lengths, **kwargs):
    mm_mask, _, special = compute_mm_masks(np.array(ids), **kwargs)
    return find_mm_token_start_pos_from_masks(mm_mask, special, lengths)


def test_special_ids_belong_to_items_but_take_no_row():
    kwargs = {"mm_token_ids": [5], "mm_special_token_ids": [6, 7]}
    mm_mask, embed_mask, special = compute_mm_masks(np.array([1, 5, 5, 6, 5, 7, 2]), **kwargs)
    np.testing.assert_array_equal(embed_mask, bools("F T T F T F F"))
    np.testing.assert_array_equal(mm_mask, bools("F T T T T T F"))
    assert find_mm_token_start_pos_from_masks(mm_mask, special, [5]) == ([1], [2, 4])


def test_special_ids_listed_as_item_ids_are_still_special():
    mm_mask, embed_mask, _ = compute_mm_masks(np.array([1, 5, 6]), mm_token_ids=[5, 6], mm_special_token_ids=[6])
    assert (embed_mask.tolist(), mm_mask.tolist()) == ([False, True, False], [False, True, True])


@pytest.mark.parametrize(
    ("ids", "lengths", "kwargs", "expected"),
    [
        ([1, 2, 3, 4, 5], [], {"vocab_size": 100}, ([], [])),
        ([1, 2, 3, 4, 5], [2], {"mm_token_ids": [99]}, ([], [])),
        ([1, 2, 10, 11, 12, 3, 4, 10, 11, 5], [3, 2], {"vocab_size": 10}, ([2, 7], [])),
        ([1, 5, 5, 5, 2, 3, 5, 5, 4], [3, 2], {"mm_token_ids": [5]}, ([1, 6], [])),
        ([1, 100, 100, 2, 3, 100, 100, 100, 4], [5], {"vocab_size": 10}, ([1], [])),
        ([0, 100, 100, 0, 0, 100, 0, 0, 100, 100, 0], [3, 2], {"vocab_size": 10}, ([1, 8], [])),
    ],
)
def test_starts(ids, lengths, kwargs, expected):
    assert starts_of(ids, lengths, **kwargs) == expected


def test_item_ids_win_over_vocab_size():
    mm_mask, _, special = compute_mm_masks(np.array([1, 200, 5]), 100, [5])
    assert mm_mask.tolist() == [False, False, True]
    assert special is None


def test_masks_need_a_discriminator():
    with pytest.raises(ValueError, match="vocab_size or mm_token_ids"):
        compute_mm_masks(np.array([1, 2, 3]))


def test_rows_of_each_item():
    mm_mask, embed_mask = bools("F T T T T T F T T T T"), bools("F F T T F T F T F T T")
    assert find_mm_embedding_lengths_from_masks(mm_mask, embed_mask, [5, 4]) == [3, 3]
    assert find_mm_embedding_lengths_from_masks(bools("F F"), bools("F F"), [2]) == []


def test_sparse_item_has_two_runs():
    mm_mask, _, _ = compute_mm_masks(np.array([11, 999, 77, 999, 12]), mm_token_ids=[999])
    assert find_mm_token_runs_from_mask(mm_mask, [2]) == ([0, 2], [1, 3], [1, 1])
    assert find_mm_token_runs_from_mask(bools("F F"), [2]) == ([0], [], [])


def test_specials_of_a_row_layout_are_found_in_stale_prompts_too():
    ids = np.array([10, 101, 102, 200, 103, 20])
    mm_mask, embed_mask, _ = compute_mm_masks(ids, 100, None, [200])
    assert find_mm_embedding_lengths_from_masks(mm_mask, embed_mask, [4]) == [3]


def test_lengths_that_do_not_cover_the_mask_are_refused():
    with pytest.raises(PlaceholderError, match="claim 4 prompt positions, the prompt holds 3"):
        find_mm_token_runs_from_mask(bools("T T T F"), [4])


@pytest.mark.parametrize(
    ("ids", "kwargs", "expected"),
    [
        (
            [10, 1001, 1002, 2000, 1003, 1004, 1005, 20],
            {"vocab_size": 1000, "mm_special_token_ids": [2000]},
            [0, 1, 2, 2, 3, 4, 5, 5],
        ),
        ([1, 100, 101, 2, 102], {"vocab_size": 100}, [0, 1, 2, 2, 3]),
        ([1, 2, 3], {"vocab_size": 100}, [0, 0, 0]),
        ([1, 50, 60, 50, 2], {"mm_token_ids": [50, 60], "mm_special_token_ids": [60]}, [0, 1, 1, 2, 2]),
    ],
)
def test_cumsum(ids, kwargs, expected):
    assert cumsum_of(ids, **kwargs) == expected
    extra = {"multimodal_data": {}}
    maybe_compute_mm_embed_cumsum(np.array(ids), extra, **kwargs)
    stored = extra["multimodal_data"]["multimodal_embed_mask_cumsum"]
    assert (stored.tolist(), stored.dtype) == (expected, np.int64)


def test_cumsum_is_left_alone_where_it_can_not_or_need_not_be_made():
    ids = np.array([1, 5, 2])
    maybe_compute_mm_embed_cumsum(ids, None, vocab_size=4)
    extra = {}
    maybe_compute_mm_embed_cumsum(ids, extra, vocab_size=4)
    assert extra == {}
    kept = np.array([0, 0, 7])
    extra = {"multimodal_data": {"multimodal_embed_mask_cumsum": kept}}
    maybe_compute_mm_embed_cumsum(ids, extra, vocab_size=4)
    assert extra["multimodal_data"]["multimodal_embed_mask_cumsum"] is kept
    extra = {"multimodal_data": {}}
    maybe_compute_mm_embed_cumsum(ids, extra)
    assert extra == {"multimodal_data": {}}


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([[(1, 2)], []], "item 1: it has no position"),
        ([[(1, 3)], [(3, 1)]], "item 1: its run at 3 overlaps what ends at 4"),
        ([[(8, 3)]], r"item 0: its run 8\.\.11 lies outside a prompt of 10"),
    ],
)
def test_spans_out_of_place_are_refused(runs, message):
    with pytest.raises(PlaceholderError, match=message):
        validate_mm_inputs(10, runs)


def test_items_with_text_between_their_runs_are_fine():
    validate_mm_inputs(10, [[(1, 2), (4, 1)], [(5, 1), (8, 2)]])


@st.composite
def prompts(draw):
    """(ids, lengths): text 0..3, rows 5, specials 6, cut into items at random."""
    ids = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 5, 6]), min_size=1, max_size=40))
    total = sum(token >= 5 for token in ids)
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=4))) if total > 1 else []
    bounds = [0, *cuts, total]
    return np.array(ids), [b - a for a, b in pairwise(bounds)] if total else []


@given(prompts())
def test_masks_runs_starts_and_rows_agree(prompt):
    ids, lengths = prompt
    mm_mask, embed_mask, special = compute_mm_masks(ids, mm_token_ids=[5], mm_special_token_ids=[6])
    assert not (embed_mask & special).any()
    np.testing.assert_array_equal(mm_mask, embed_mask | special)
    offsets, positions, run_lengths = find_mm_token_runs_from_mask(mm_mask, lengths)
    starts, special_offsets = find_mm_token_start_pos_from_masks(mm_mask, special, lengths)
    rows = find_mm_embedding_lengths_from_masks(mm_mask, embed_mask, lengths)
    assert sum(rows) == mm_embed_cumsum(embed_mask)[-1] == mm_mask.sum() - len(special_offsets)
    covered = np.zeros_like(mm_mask)
    for item, length in enumerate(lengths):
        runs = list(zip(positions, run_lengths, strict=True))[offsets[item] : offsets[item + 1]]
        assert runs[0][0] == starts[item]
        assert sum(size for _, size in runs) == length
        for (first, size), (second, _) in pairwise(runs):
            assert first + size < second, "runs of an item are maximal"
        for first, size in runs:
            assert not covered[first : first + size].any()
            covered[first : first + size] = True
    np.testing.assert_array_equal(covered, mm_mask)
    validate_mm_inputs(
        len(ids),
        [list(zip(positions[a:b], run_lengths[a:b], strict=True)) for a, b in pairwise(offsets)],
    )
