# SPDX-License-Identifier: Apache-2.0
"""Claim: an encode step commits all of its outputs or none, and a failure falls on the requests it belongs to."""

from __future__ import annotations

import numpy as np
import pytest
from encoder_kit import PROMPT, make_items, make_scheduler, select, spread

from mmjax.encoder.plan import ItemRef
from mmjax.encoder.step import (
    MultimodalEncoderContractError,
    MultimodalEncoderOutputError,
    MultimodalEncoderRequestError,
    check_outputs,
)

WIDTH, DTYPE = 2, "float32"


def outputs_of(plan, **wrong):
    """Outputs as the encoder gives them; `wrong` replaces that of a request."""
    return [wrong.get(f"r{i.request_id}", np.zeros((i.load.rows, WIDTH), np.float32)) for i in plan.items]


def producers_and_follower():
    """Three producers of two rows each, "1" to "3", and "4", which shares the item of "2"."""
    scheduler = make_scheduler()
    for request_id, key in zip("1234", "abcb", strict=True):
        scheduler.admit(request_id, make_items(5, rows=2, keys=[key]))
    return scheduler


WRONG = [
    np.zeros((3, WIDTH), np.float32),
    np.zeros((2, 4), np.float32),
    np.zeros((2, WIDTH), np.float16),
    np.zeros((1, 2, WIDTH), np.float32),
    [[0.0, 0.0], [0.0, 0.0]],
    None,
]


@pytest.mark.parametrize("wrong", WRONG, ids=["rows", "width", "dtype", "rank", "type", "none"])
def test_one_wrong_output_commits_nothing_and_fails_those_who_wait_for_it(wrong):
    scheduler = producers_and_follower()
    plan = select(scheduler, *"1234")[2]
    with pytest.raises(MultimodalEncoderOutputError, match=r"must produce \(2, 2\) float32, got") as caught:
        check_outputs(plan.items, outputs_of(plan, r2=wrong), WIDTH, DTYPE)
    assert scheduler.fail(plan, caught.value) == ["2", "4"]
    assert scheduler.cache.stats().current_bytes == 0
    assert [scheduler.ready_end(request_id, 0, PROMPT) for request_id in "1234"] == [0, 0, 0, 0]

    items, ready, retry = select(scheduler, *"1234")
    assert items == {"1": [0], "2": [0], "3": [0]}
    assert ready == list("1234")
    check_outputs(retry.items, outputs_of(retry), WIDTH, DTYPE)
    assert sorted(scheduler.commit(retry)) == [(request_id, 0) for request_id in "1234"]
    assert scheduler.cache.stats().current_bytes == 24
    assert [scheduler.ready_end(request_id, 0, PROMPT) for request_id in "1234"] == [PROMPT] * 4


def test_a_follower_becomes_the_producer_when_its_producer_failed():
    scheduler = make_scheduler()
    for request_id in ("producer", "follower"):
        scheduler.admit(request_id, make_items(5, keys=["same"]))
    plan = select(scheduler, "producer", "follower")[2]
    assert scheduler.fail(plan, MultimodalEncoderContractError("rows and grid disagree")) == ["producer"]
    scheduler.remove("producer")
    assert select(scheduler, "follower")[:2] == ({"follower": [0]}, ["follower"])


def test_one_output_per_item():
    scheduler = producers_and_follower()
    plan = select(scheduler, *"1234")[2]
    for outputs in ([], outputs_of(plan)[:2]):
        with pytest.raises(MultimodalEncoderContractError, match="one output per item") as caught:
            check_outputs(plan.items, outputs, WIDTH, DTYPE)
        assert scheduler.fail(plan, caught.value) == ["1", "2", "3"]


def test_an_error_that_knows_its_requests_is_theirs_alone():
    scheduler = producers_and_follower()
    plan = select(scheduler, *"1234")[2]
    assert scheduler.fail(plan, MultimodalEncoderContractError("bad grid", ["3"], item=0)) == ["3"]
    assert scheduler.fail(plan, MultimodalEncoderRequestError("gone", ["stale"])) == []
    assert scheduler.fail(plan, MultimodalEncoderRequestError("no ids")) == ["1", "2", "3"]


def test_running_out_of_memory_is_nobodys_fault():
    scheduler = producers_and_follower()
    plan = select(scheduler, *"1234")[2]
    before = scheduler.cache.stats()
    with pytest.raises(MemoryError):
        scheduler.fail(plan, MemoryError())
    assert scheduler.cache.stats() == before


def test_rows_of_a_request_that_is_gone_or_not_ready():
    scheduler = make_scheduler()
    with pytest.raises(MultimodalEncoderRequestError, match=r"no longer active.*no encoder item state"):
        scheduler.row_slots("1", 0)
    scheduler.admit("1", make_items(5))
    with pytest.raises(MultimodalEncoderRequestError, match="request 1, item 0: has no encoder output"):
        scheduler.row_slots("1", 0)


def test_chunks_cut_rows_across_items():
    scheduler = make_scheduler(items=1)
    scheduler.admit("1", spread((1, 2), (4, 6)))
    first = select(scheduler, "1")[2]
    assert scheduler.commit(first) == [ItemRef("1", 0)]
    with pytest.raises(MultimodalEncoderRequestError):
        scheduler.chunk_slots("1", 1, 3)
    assert scheduler.commit(select(scheduler, "1")[2]) == [ItemRef("1", 1)]

    rows = np.concatenate([scheduler.row_slots("1", 0), scheduler.row_slots("1", 1)])
    cumsum = np.array([0, 1, 2, 2, 2, 3, 4, 5])
    for begin, end, low, high in [(0, 8, 0, 5), (0, 3, 0, 2), (2, 7, 1, 4), (6, 8, 3, 5), (3, 5, 2, 2)]:
        cached = int(cumsum[begin - 1]) if begin else 0
        chunk = scheduler.chunk_slots("1", cached, int(cumsum[end - 1]) - cached)
        np.testing.assert_array_equal(chunk, rows[low:high])
        assert chunk.dtype == np.int32
    assert scheduler.cache.stats().current_bytes == 20
    assert np.shares_memory(scheduler.chunk_slots("1", 2, 3), scheduler.row_slots("1", 1))
    with pytest.raises(MultimodalEncoderRequestError, match="up to 6, it has 5"):
        scheduler.chunk_slots("1", 2, 4)


def test_a_text_request_takes_no_rows():
    assert make_scheduler().chunk_slots("text", 0, 0).shape == (0,)


def test_removing_twice_releases_once():
    scheduler = make_scheduler(retain=False)
    scheduler.admit("1", make_items(5, 5))
    scheduler.commit(select(scheduler, "1")[2])
    for _ in range(2):
        scheduler.remove("1")
        stats = scheduler.cache.stats()
        assert (stats.items, stats.in_use_bytes, stats.reserved_bytes) == (0, 0, 0)


def test_new_weights_wait_for_the_last_user():
    scheduler = make_scheduler()
    scheduler.admit("1", make_items(5, keys=["k"]))
    scheduler.commit(select(scheduler, "1")[2])
    with pytest.raises(RuntimeError, match="live multimodal cache references"):
        scheduler.invalidate()
    scheduler.remove("1")
    assert scheduler.cache.stats().items == 1
    scheduler.invalidate()
    assert scheduler.cache.stats().items == 0


def test_a_lost_pool_is_forgotten_and_filled_again():
    scheduler = make_scheduler()
    scheduler.admit("1", make_items(5, keys=["k"]))
    scheduler.admit("2", make_items(5))
    scheduler.commit(select(scheduler, "1")[2])
    select(scheduler, "2")
    scheduler.begin()
    scheduler.reset()
    assert scheduler.cache.claimed_rows == 0
    assert select(scheduler, "1", "2")[:2] == ({"1": [0], "2": [0]}, ["1", "2"])


def test_a_request_is_admitted_once():
    scheduler = make_scheduler()
    scheduler.admit("1", make_items(5))
    with pytest.raises(ValueError, match="admitted already"):
        scheduler.admit("1", make_items(5))
