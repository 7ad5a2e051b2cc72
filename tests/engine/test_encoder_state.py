# SPDX-License-Identifier: Apache-2.0
"""Claim: a request's encoder state binds each item to one cache reference and knows which items have rows."""

from __future__ import annotations

import numpy as np
import pytest
from encoder_kit import make_items, spread

from mmjax.encoder.buckets import EncoderLoad
from mmjax.encoder.state import EncoderItem, MultimodalEncoderProgress, MultimodalEncoderRequestState
from mmjax.inputs.items import ItemPlan, Modality


def make_state(*args, **kwargs):
    return MultimodalEncoderRequestState("r", tuple(make_items(*args, **kwargs)))


def test_progress_through_ready_and_back():
    state = make_state(3, 4)
    assert state.progress is MultimodalEncoderProgress.PENDING
    state.set_item_cache_key(0, "a")
    state.set_item_cache_key(1, "b")
    assert state.mark_cache_key_ready("b") == [1]
    assert state.progress is MultimodalEncoderProgress.PARTIAL
    assert state.pending_item_indices == [0]
    state.mark_cache_key_ready("a")
    assert state.progress is MultimodalEncoderProgress.READY
    assert state.pop_all_cache_keys() == ["a", "b"]
    assert state.progress is MultimodalEncoderProgress.PENDING
    assert state.pop_all_cache_keys() == []


def test_no_items_are_ready_items():
    assert MultimodalEncoderRequestState("r", ()).progress is MultimodalEncoderProgress.READY


def test_lists_have_one_entry_per_item():
    items = tuple(make_items(3, 4))
    with pytest.raises(ValueError, match="one cache key per item slot"):
        MultimodalEncoderRequestState("r", items, item_cache_keys=["a"])
    with pytest.raises(ValueError, match="one flag per item slot"):
        MultimodalEncoderRequestState("r", items, item_ready=[True])


def test_a_slot_is_bound_once_and_cleared_once():
    state = make_state(3)
    state.set_item_cache_key(0, "a")
    with pytest.raises(ValueError, match="already"):
        state.set_item_cache_key(0, "b")
    state.mark_cache_key_ready("a")
    assert state.clear_item_cache_key(0) == "a"
    assert state.item_ready == [False]
    with pytest.raises(ValueError, match="no cache key"):
        state.clear_item_cache_key(0)


def test_equal_items_own_a_reference_each():
    state = make_state(3, 4, 3, keys=["a", "b", "a"])
    for i in range(3):
        state.set_item_cache_key(i, state.key(i))
    assert state.mark_cache_key_ready("a") == [0, 2]
    assert state.mark_cache_key_ready("a") == []
    assert state.pop_all_cache_keys() == ["a", "b", "a"]


def test_an_item_without_a_content_key_is_nobody_elses():
    state = make_state(3, 4, keys=["a", None])
    assert [state.key(0), state.key(1)] == ["a", ("mm_transient", "r", 1)]


def test_needed_items_are_those_a_chunk_reaches():
    state = MultimodalEncoderRequestState("r", tuple(spread((2, 5), (8, 9), (12, 20))))
    assert state.needed() == [0, 1, 2]
    assert [state.needed(end) for end in (2, 3, 8, 9, 13)] == [[], [0], [0], [0, 1], [0, 1, 2]]
    state.computed = 5  # the prefix cache served all but the last position of item 0
    assert state.needed(13) == [0, 1, 2]
    state.computed = 6
    assert state.needed(13) == [1, 2]
    state.item_ready[1] = True
    assert state.needed() == [2]


def test_the_cost_of_a_planned_item():
    plan = ItemPlan(Modality.VIDEO, (3, 4, 4), 12, (16, 16, 16), 5, np.zeros(14, np.int32), np.ones(14, bool))
    item = EncoderItem.from_plan(plan, np.arange(7, 19, dtype=np.int32), "key")
    assert item == EncoderItem("key", EncoderLoad(1, 48, 3, 5, 12), 7, 18)
    assert EncoderItem.supplied([3, 4, 6], None) == EncoderItem(None, EncoderLoad(rows=3), 3, 6)
