# SPDX-License-Identifier: Apache-2.0
"""Claim: embedding rows land at their positions only, and the engine's gather equals the general function."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.layers.fusion import filter_mm_token_from_input_ids, fuse_input_embeds, gather_embeds

WIDTH = 4


def table(vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((vocab, WIDTH), np.float32)


def test_tokens_outside_the_vocabulary_are_multimodal():
    text, mm = filter_mm_token_from_input_ids(np.array([1, 2, 11, 3, 12, 9, 15]), vocab_size=10)
    assert (text.tolist(), mm.tolist()) == ([0, 1, 3, 5], [2, 4, 6])


@pytest.mark.parametrize("tail", [[], [101, 102, 103]], ids=["within", "beyond"])
def test_listed_tokens_are_multimodal_whatever_the_vocabulary(tail):
    ids = np.array([1, 2, 55, 3, 77, 9, 88, *tail])
    text, mm = filter_mm_token_from_input_ids(ids, vocab_size=100, mm_token_ids=np.array([55, 77, 88]))
    assert mm.tolist() == [2, 4, 6]
    assert text.tolist() == [0, 1, 3, 5, *range(7, len(ids))]


@pytest.mark.parametrize("nothing", [None, []], ids=["none", "empty"])
def test_without_rows_the_ids_come_back(nothing):
    ids = np.array([1, 2, 3])
    assert fuse_input_embeds(table(10), ids, nothing) == (ids, None)


def test_a_missing_row_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match=r"token count mismatch: 2 positions, 1 embedding rows"):
        fuse_input_embeds(table(10), np.array([1, 11, 12]), [table(1)])


def test_explicit_positions_and_found_ones_agree():
    embedding, ids, rows = table(40), np.array([0, 1, 41, 2, 42, 3, 43, 4]), table(3, seed=1)
    text, mm = np.array([0, 1, 3, 5, 7]), np.array([2, 4, 6])
    found = fuse_input_embeds(embedding, ids, [rows])
    given_ = fuse_input_embeds(embedding, ids, [rows], text_token_indices=text, mm_token_indices=mm)
    assert found[0] is None
    assert given_[0] is None
    np.testing.assert_array_equal(found[1], given_[1])
    np.testing.assert_array_equal(found[1][mm], rows)
    np.testing.assert_array_equal(found[1][text], embedding[ids[text]])


def test_unknown_keywords_are_ignored_and_rows_may_come_in_parts():
    embedding, ids, rows = table(10), np.array([1, 11, 12]), table(2, seed=1)
    whole = fuse_input_embeds(embedding, ids, rows)[1]
    parts = fuse_input_embeds(embedding, ids, [rows[:1], rows[1:]], multimodal_params=[])[1]
    np.testing.assert_array_equal(whole, parts)


def test_explicit_positions_override_a_wrong_list_of_ids():
    embedding, ids, rows = table(10), np.array([1, 7, 2]), table(1, seed=1)
    wrong = np.array([1, 2])
    _, out = fuse_input_embeds(embedding, ids, rows, wrong, np.array([0, 2]), np.array([1]))
    np.testing.assert_array_equal(out, np.stack([embedding[1], rows[0], embedding[2]]))
    # One of the two is not enough: the ids decide again.
    with pytest.raises(ValueError, match="2 positions, 1 embedding rows"):
        fuse_input_embeds(embedding, ids, rows, wrong, mm_token_indices=np.array([1]))


def test_a_repeated_id_is_replaced_only_where_the_positions_say():
    embedding, ids, rows = table(10), np.array([0, 7, 1, 7, 2]), table(1, seed=1)
    _, out = fuse_input_embeds(
        embedding, ids, rows, text_token_indices=np.array([0, 2, 3, 4]), mm_token_indices=np.array([1])
    )
    np.testing.assert_array_equal(out[1], rows[0])
    np.testing.assert_array_equal(out[jnp.array([0, 2, 3, 4])], embedding[[0, 1, 7, 2]])


def test_extra_streams_are_zero_at_text():
    rows, extra = table(2, seed=1), table(2, seed=2)
    _, embeds, extras = fuse_input_embeds(table(10), np.array([11, 3, 12]), rows, extra_embeds=[extra])
    assert embeds.shape == (3, WIDTH)
    np.testing.assert_array_equal(extras[0], np.stack([extra[0], np.zeros(WIDTH), extra[1]]))


def test_rows_take_the_dtype_of_the_table():
    _, out = fuse_input_embeds(jnp.asarray(table(10), jnp.bfloat16), np.array([1, 11]), table(1))
    assert out.dtype == jnp.bfloat16


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 2), st.randoms(use_true_random=False))
def test_the_gather_equals_the_general_function(is_mm, levels, random):
    """Rows come from arbitrary pool slots; unused ones hold NaN."""
    embedding, is_mm = table(9), np.array(is_mm)
    count, pool_rows = int(is_mm.sum()), 8
    rows = np.random.default_rng(1).standard_normal((count, WIDTH * (1 + levels))).astype(np.float32)
    slots = np.array(random.sample(range(pool_rows), count), np.int32)
    pool = np.full((pool_rows, WIDTH * (1 + levels)), np.nan, np.float32)
    pool[slots] = rows
    row_index = np.full(6, pool_rows, np.int32)
    row_index[is_mm] = slots
    ids = np.where(is_mm, 0, np.arange(6)).astype(np.int32)

    hidden, deepstack = gather_embeds(embedding, ids, pool, row_index)

    extras = [rows[:, WIDTH * k : WIDTH * (k + 1)] for k in range(1, levels + 1)]
    at = {"text_token_indices": np.flatnonzero(~is_mm), "mm_token_indices": np.flatnonzero(is_mm)}
    expected = fuse_input_embeds(embedding, ids, rows[:, :WIDTH], extra_embeds=extras, **at) if count else None
    np.testing.assert_array_equal(hidden, expected[1] if count else embedding[ids])
    assert (deepstack is None) == (levels == 0)
    if levels:
        assert deepstack.shape == (levels, 6, WIDTH)
        np.testing.assert_array_equal(deepstack, np.stack(expected[2]) if count else np.zeros((levels, 6, WIDTH)))


def test_the_gather_uses_the_embedding_function_it_is_given():
    embedding, pool = table(4), table(2, seed=1)
    row_index = np.array([2, 1], np.int32)
    hidden, _ = gather_embeds(embedding, np.array([3, 0]), pool, row_index, embed=lambda ids: 2 * embedding[ids])
    np.testing.assert_array_equal(hidden, np.stack([2 * embedding[3], pool[1]]))
