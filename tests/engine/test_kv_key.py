# SPDX-License-Identifier: Apache-2.0
"""Claim: KV blocks are shared exactly between prompts with equal text, items, options and tenant before their end."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.inputs import kv_key
from mmjax.inputs.kv_key import (
    DigestToken,
    augment_tokens_for_block_reuse,
    block_key,
    block_keys,
    mm_key_tokens,
    prefix_hash,
    root_key,
)
from mmjax.inputs.params import MultimodalInput

V = 1000
WORDS = [1, 2, 3, 4, 5, 6, 7, 8]
D = struct.pack(">8i", *WORDS)
WORDS_2 = [9, -8, 7, -6, 5, -4, 3, -2]
D2 = struct.pack(">8i", *WORDS_2)


def items(*runs, hashes=(WORDS, WORDS_2), uuids=None, with_runs=True) -> MultimodalInput:
    """One item for each list of (position, length) runs."""
    lengths = [sum(length for _, length in item) for item in runs]
    csr = {}
    if with_runs:
        csr = {
            "multimodal_item_run_cu_offsets": np.cumsum([0, *map(len, runs)]).tolist(),
            "multimodal_run_positions": [position for item in runs for position, _ in item],
            "multimodal_run_lengths": [length for item in runs for _, length in item],
        }
    return MultimodalInput(
        multimodal_hashes=[list(words) for words in hashes[: len(runs)]],
        multimodal_positions=[item[0][0] for item in runs],
        multimodal_lengths=lengths,
        multimodal_uuids=uuids,
        **csr,
    )


def keys_of(mm_input, length: int, start=0, end=None):
    return augment_tokens_for_block_reuse(range(length), mm_input, V, start, end)


def test_the_first_position_is_the_digest_and_the_rest_count_on():
    assert keys_of(items([(1, 4)]), 8) == [0, D, 1001, 1002, 1003, 5, 6, 7]
    assert mm_key_tokens(D, 2, 3, V) == [1002, 1003, 1004]


def test_a_uuid_rides_along_unseen():
    named, other = DigestToken(D, "a"), DigestToken(D, "b")
    assert named == other == D
    assert hash(named) == hash(D)
    assert (named.uuid, other.uuid) == ("a", "b")
    keys = keys_of(items([(1, 4)], uuids=["a"]), 8)
    assert keys[1].uuid == "a"
    assert block_key(root_key(), keys) == block_key(root_key(), keys_of(items([(1, 4)]), 8))


def test_only_items_with_a_uuid_carry_one():
    keys = keys_of(items([(1, 2)], [(4, 2)], uuids=["a", None]), 8)
    assert type(keys[1]) is DigestToken
    assert type(keys[4]) is bytes


def test_counting_goes_on_across_runs_and_text_between_stays():
    sparse = items([(1, 2), (8, 2)])
    assert keys_of(sparse, 11) == [0, D, 1001, 3, 4, 5, 6, 7, 1002, 1003, 10]
    assert keys_of(sparse, 11, 7, 10) == [7, 1002, 1003]


def test_a_slice_without_items_is_plain_text(monkeypatch):
    monkeypatch.setattr(kv_key, "mm_key_tokens", lambda *_: pytest.fail("made key tokens for a slice of text"))
    assert keys_of(items([(1, 2), (8, 2)]), 11, 3, 8) == [3, 4, 5, 6, 7]


def test_two_sparse_items_in_a_slice():
    assert keys_of(items([(1, 2), (6, 1)], [(9, 1), (12, 2)]), 15, 8, 13) == [8, D2, 10, 11, 1001]


def test_adjacent_runs_are_one_run():
    whole = [0, D, 1001, 1002, 1003, 5, 6, 7]
    assert keys_of(items([(1, 4)]), 8) == keys_of(items([(1, 2), (3, 2)]), 8) == whole


def test_a_prompt_committed_in_pieces():
    item = items([(1, 8)])
    pieces = [keys_of(item, 12, start, start + 4) for start in (0, 4, 8)]
    assert pieces == [[0, D, 1001, 1002], [1003, 1004, 1005, 1006], [1007, 9, 10, 11]]


def test_without_runs_the_span_counts():
    assert keys_of(items([(2, 3)], with_runs=False), 8, 1, 5) == [1, D, 1001, 1002]


def test_without_items_ids_are_keys():
    assert keys_of(None, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("words", [[1, 2, 3], [2**31, 0, 0, 0, 0, 0, 0, 0]])
def test_malformed_hashes_are_refused(words):
    with pytest.raises(ValueError, match=r"int32|32-bit"):
        keys_of(items([(1, 4)], hashes=(words,)), 8)


# --- blocks ---


def shared_blocks(one, other, size: int, salts=(None, None)) -> int:
    a, b = block_keys(one, size, root_key(salts[0])), block_keys(other, size, root_key(salts[1]))
    same = [x == y for x, y in zip(a, b, strict=True)]
    assert same == sorted(same, reverse=True), "once chains part they never meet again"
    return sum(same)


def test_different_images_share_the_text_before_them_alone():
    """8 text, an image of 6 rows, 6 text, blocks of 4: 2 blocks are common."""
    prompts = [keys_of(items([(8, 6)], hashes=(words,)), 20) for words in (WORDS, WORDS_2)]
    assert shared_blocks(*prompts, size=4) == 2
    assert shared_blocks(prompts[0], list(prompts[0]), size=4) == 5


def test_options_that_fill_equal_positions_do_not_share():
    hashes = [prefix_hash(WORDS, options) for options in ("00" * 32, "11" * 32)]
    prompts = [keys_of(items([(8, 6)], hashes=(words,)), 20) for words in hashes]
    assert shared_blocks(*prompts, size=4) == 2


def test_tenants_share_nothing():
    text = list(range(12))
    assert shared_blocks(text, text, 4, ("a", "b")) == 0
    assert shared_blocks(text, text, 4, ("a", None)) == 0
    assert shared_blocks(text, text, 4, ("a", "a")) == 3


def test_a_part_of_a_block_has_no_key():
    assert len(block_keys(list(range(11)), 4, root_key())) == 2
    assert block_keys([1, 2], 4, root_key()) == []


def test_keys_go_on_from_a_parent():
    keys = block_keys(list(range(8)), 4, root_key())
    assert keys[1] == block_key(keys[0], [4, 5, 6, 7])
    assert len(set(keys)) == 2


key_tokens = st.lists(st.integers(0, 2**40) | st.sampled_from([D, D2]), max_size=6)


@given(key_tokens, key_tokens)
def test_equal_keys_mean_equal_tokens(one, other):
    assert (block_key(root_key(), one) == block_key(root_key(), other)) == (one == other)
