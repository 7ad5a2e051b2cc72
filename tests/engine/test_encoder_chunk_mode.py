# SPDX-License-Identifier: Apache-2.0
"""Claim: with chunks, items take rows when a chunk reaches them, in order, and nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from encoder_kit import make_items, make_scheduler, selected, spread

from mmjax.encoder.buckets import EncoderLoad
from mmjax.encoder.plan import ItemRef, Refusal
from mmjax.encoder.state import EncoderItem


def chunked(**budgets):
    return make_scheduler(readiness="chunk", **budgets)


def step(scheduler, *scheduled, **options):
    """Plans, commits and prefills; returns what was encoded and the chunk ends."""
    plan = scheduler.plan(scheduled, **options)
    scheduler.commit(plan)
    for request_id, end in plan.chunk_end.items():
        scheduler.advance(request_id, end)
    return selected(plan), dict(plan.chunk_end)


def test_a_chunk_ends_before_the_first_item_without_rows():
    scheduler = chunked(rows=4)
    scheduler.admit("1", spread((2, 4), (6, 8)))
    assert step(scheduler, ("1", 0, 10)) == ({"1": [0]}, {"1": 6})
    assert step(scheduler, ("1", 6, 10)) == ({"1": [1]}, {"1": 10})


def test_a_request_longer_than_the_pool_streams_through():
    scheduler = chunked(rows=3, items=1, retain=False)
    scheduler.admit("film", spread(*((i, i + 2) for i in range(0, 30, 3))))
    computed, encoded = 0, []
    for _ in range(10):
        items, ends = step(scheduler, ("film", computed, 30))
        encoded += items["film"]
        computed = ends["film"]
    assert (computed, encoded) == (30, list(range(10)))
    assert scheduler.cache.stats().items == 0


def test_an_item_is_encoded_when_its_chunk_comes_and_not_again():
    scheduler = chunked()
    scheduler.admit("1", spread((1, 6), (8, 13), (15, 20)))
    encoded = [step(scheduler, ("1", begin, begin + 4))[0].get("1", []) for begin in range(0, 24, 4)]
    assert encoded == [[0], [], [1], [2], [], []]
    scheduler.remove("1")
    assert scheduler.cache.stats().items == 0


def test_cancelled_in_the_first_picture_the_third_is_never_encoded():
    scheduler = chunked()
    scheduler.admit("1", spread((0, 5), (6, 11), (12, 17)))
    step(scheduler, ("1", 0, 4))
    scheduler.remove("1")
    assert scheduler.stats()["items_encoded"] == 1


def test_rows_go_back_after_the_last_position():
    scheduler = chunked(rows=6)
    scheduler.admit("1", spread((2, 4)))
    step(scheduler, ("1", 0, 4))
    assert scheduler.holds_rows("1")
    step(scheduler, ("1", 4, 5))
    assert not scheduler.holds_rows("1")


@pytest.mark.parametrize("hit", range(10))
def test_a_prefix_hit_inside_an_item_still_encodes_it(hit):
    scheduler = chunked()
    scheduler.admit("1", spread((2, 4), (6, 8)))
    plan = scheduler.plan([("1", hit, 10)])
    assert [item.item for item in plan.items] == [i for i, last in enumerate((4, 8)) if last >= hit]
    assert plan.chunk_end == {"1": 10}


def test_one_picture_three_times_and_in_another_request():
    for order in ("12", "21"):
        scheduler = chunked()
        scheduler.admit("1", spread((0, 2), (4, 6), (8, 10), keys=["A", "B", "A"]))
        scheduler.admit("2", spread((0, 2), keys=["A"]))
        plan = scheduler.plan([("1", 0, 12), ("2", 0, 12)])
        assert [item.key for item in plan.items] == ["A", "B"]
        assert sorted(scheduler.commit(plan)) == [("1", 0), ("1", 1), ("1", 2), ("2", 0)]
        slots = scheduler.row_slots("1", 0)
        np.testing.assert_array_equal(slots, scheduler.row_slots("1", 2))
        np.testing.assert_array_equal(slots, scheduler.row_slots("2", 0))
        for request_id in order:
            assert scheduler.cache.references("A") > 0
            scheduler.advance(request_id, 12)
        assert scheduler.cache.claimed_rows == 0
        assert scheduler.cache.stats().current_bytes == 24


def test_a_repeat_hits_and_says_that_its_pixels_may_go():
    scheduler = chunked()
    for request_id in "12":
        scheduler.admit(request_id, spread((0, 2), keys=["A"]))
    step(scheduler, ("1", 0, 5))
    plan = scheduler.plan([("2", 0, 5)])
    assert (bool(plan), plan.hits, plan.chunk_end) == (False, (ItemRef("2", 0),), {"2": 5})
    assert scheduler.commit(plan) == [ItemRef("2", 0)]


def test_without_pixels_a_chunk_waits_but_a_shared_row_serves():
    scheduler = chunked()
    scheduler.admit("1", spread((2, 4), keys=["A"]))
    scheduler.admit("2", spread((2, 4), keys=["A"]))
    scheduler.set_pixels("1", 0, False)
    plan = scheduler.plan([("1", 0, 6)])
    assert (plan.chunk_end, plan.lacking_pixels) == ({"1": 2}, (ItemRef("1", 0),))
    assert scheduler.lacking_pixels("1", 0) == [0]
    assert step(scheduler, ("2", 0, 6), ("1", 2, 6)) == ({"2": [0]}, {"2": 6, "1": 6})
    assert scheduler.lacking_pixels("1", 0) == []


def test_budgets_a_and_b_and_the_buckets_bound_a_step():
    for budgets in ({"items": 2}, {"tokens": 9}):
        scheduler = chunked(**budgets)
        scheduler.admit("1", spread((0, 0), (1, 1), (2, 2)))
        assert step(scheduler, ("1", 0, 5)) == ({"1": [0, 1]}, {"1": 2})


def test_a_cap_on_encoder_tokens_lets_one_item_through():
    scheduler = chunked()
    scheduler.admit("1", spread((0, 0), (1, 1), tokens=4))
    assert step(scheduler, ("1", 0, 5), encoder_token_cap=3) == ({"1": [0]}, {"1": 1})
    assert step(scheduler, ("1", 1, 5), encoder_token_cap=3) == ({"1": [1]}, {"1": 5})


def test_tokens_that_a_blocked_request_leaves_go_to_the_next():
    scheduler = chunked(rows=4)
    scheduler.admit("old", spread((0, 3)))
    scheduler.admit("new", spread((0, 2)))
    scheduler.commit(scheduler.plan([("new", 0, 2)]))
    plan = scheduler.plan([("old", 0, 8), ("new", 2, 8), ("text", 0, 8)], token_budget=8)
    assert plan.chunk_end == {"old": 0, "new": 8, "text": 2}


def test_requests_that_leave_in_mid_step_leave_no_trace():
    scheduler = chunked()
    scheduler.admit("1", spread((0, 2), keys=["A"]))
    scheduler.admit("2", spread((0, 2), keys=["A"]))
    scheduler.admit("3", spread((0, 2), keys=["B"]))
    scheduler.begin()
    for request_id in "123":
        scheduler.claim(request_id, 0, 5)
    scheduler.remove("1")
    scheduler.remove("3")
    plan = scheduler.close()
    assert selected(plan) == {"2": [0]}
    scheduler.remove("2")
    assert scheduler.commit(plan) == []
    assert scheduler.cache.stats().items == 0
    assert scheduler.cache.claimed_rows == 0


def test_a_follower_without_pixels_stops_when_its_producer_leaves():
    scheduler = chunked()
    for request_id in "12":
        scheduler.admit(request_id, spread((2, 4), keys=["A"]))
    scheduler.set_pixels("2", 0, False)
    scheduler.begin()
    assert [scheduler.claim(request_id, 0, 5).end for request_id in "12"] == [5, 5]
    scheduler.remove("1")
    plan = scheduler.close()
    assert (plan.chunk_end["2"], bool(plan)) == (2, False)


def test_rows_that_the_caller_supplies_are_written_and_not_encoded():
    scheduler = chunked(items=1, rows=5)
    given = EncoderItem.supplied([3, 4, 5], "given")
    scheduler.admit("1", [EncoderItem(None, EncoderLoad(1, 4, 1, 0, 2), 0, 1), given])
    plan = scheduler.plan([("1", 0, 8)])
    assert (selected(plan), [write.item for write in plan.writes], plan.chunk_end) == ({"1": [0]}, [1], {"1": 8})
    assert sorted(scheduler.commit(plan)) == [("1", 0), ("1", 1)]
    assert sorted(scheduler.chunk_slots("1", 0, 5)) == [0, 1, 2, 3, 4]
    assert scheduler.stats()["items_encoded"] == 1


# First come, first served, without starving.


def test_a_smaller_item_passes_one_that_does_not_fit():
    scheduler = chunked(rows=10)
    scheduler.admit("holder", spread((0, 4)))
    scheduler.admit("big", spread((0, 6)))
    scheduler.admit("small", spread((0, 2)))
    scheduler.commit(scheduler.plan([("holder", 0, 2)]))
    plan = scheduler.plan([("holder", 2, 3), ("big", 0, 9), ("small", 0, 9)])
    assert plan.chunk_end == {"holder": 3, "big": 0, "small": 9}


@pytest.mark.parametrize("shared", [False, True])
def test_a_stream_of_small_items_does_not_starve_a_large_one(shared):
    """Each small request holds its rows for two steps, a new one arrives at every step."""
    scheduler = chunked(rows=10)
    scheduler.admit("small 0", spread((0, 3), keys=["popular" if shared else None]))
    step(scheduler, ("small 0", 0, 2))
    scheduler.admit("big", spread((0, 9)))
    computed = {"small 0": 2, "big": 0}
    for number in range(1, 30):
        name = f"small {number}"
        scheduler.admit(name, spread((0, 3), keys=["popular" if shared else None]))
        computed[name] = 0
        _, ends = step(scheduler, *((r, done, min(done + 2, 10)) for r, done in computed.items()))
        computed |= ends
        for request_id in [r for r, done in computed.items() if r != "big" and done >= 4]:
            scheduler.remove(request_id)
            del computed[request_id]
        if computed["big"]:
            break
    assert number <= 3


def test_only_rows_beside_the_oldest_blocked_request_are_lent():
    scheduler = chunked(rows=10)
    for name, span in [("holder", 4), ("big", 7), ("a", 2), ("b", 2)]:
        scheduler.admit(name, spread((0, span - 1)))
    scheduler.commit(scheduler.plan([("holder", 0, 1)]))
    scheduler.begin()
    assert scheduler.claim("big", 0, 9) == (0, Refusal.ROWS)
    assert scheduler.claim("a", 0, 9) == (9, None)
    assert scheduler.claim("b", 0, 9) == (0, Refusal.ROWS)  # 2 + 2 rows would not leave 7 of 10
    scheduler.commit(scheduler.close())


# Look-ahead.


def test_rows_encoded_ahead_are_held_by_nobody_and_may_be_evicted():
    scheduler = chunked(rows=2)
    scheduler.admit("running", make_items(4))
    for name in "ab":
        scheduler.admit(name, make_items(4, keys=[name]))
    scheduler.begin()
    scheduler.look_ahead(["a", "b"])
    plan = scheduler.close()
    assert (selected(plan), plan.look_ahead) == ({"a": [0], "b": [0]}, ("a", "b"))
    assert scheduler.commit(plan) == []
    assert scheduler.cache.claimed_rows == 0

    encodes = 2
    for name in ("running", "a", "b"):  # all end, though the pool has room for two of three
        items, ends = step(scheduler, (name, 0, 5))
        encodes += len(items)
        assert ends == {name: 5}
    assert encodes <= 2 + 1 + 2


def test_looking_ahead_saves_the_encode_later():
    scheduler = chunked()
    scheduler.admit("a", make_items(4, 4, keys=["x", "y"]))
    scheduler.begin()
    scheduler.look_ahead(["a"])
    scheduler.commit(scheduler.close())
    assert step(scheduler, ("a", 0, 5)) == ({}, {"a": 5})
    assert scheduler.stats()["items_looked_ahead"] == 2


def test_looking_ahead_settles_instead_of_evicting_its_own():
    scheduler = chunked(rows=2)
    for name in "abc":
        scheduler.admit(name, make_items(4, keys=[name]))
    encoded = []
    for _ in range(4):
        scheduler.begin()
        scheduler.look_ahead("abc")
        plan = scheduler.close()
        scheduler.commit(plan)
        encoded.append(sorted(selected(plan)))
    assert encoded == [["a", "b"], [], [], []]


def test_looking_ahead_needs_rows_that_stay_and_spends_only_what_is_left():
    unkept = chunked(retain=False)
    unkept.admit("a", make_items(4, keys=["a"]))
    unkept.begin()
    unkept.look_ahead("a")
    assert not unkept.close()

    scheduler = chunked(tokens=10)
    scheduler.admit("now", make_items(8, keys=["now"]))
    scheduler.admit("later", make_items(4, 1, keys=["later", "last"]))
    scheduler.begin()
    scheduler.claim("now", 0, 5)
    scheduler.look_ahead(["now", "later"])
    assert selected(scheduler.close()) == {"now": [0]}


def test_a_failed_look_ahead_leaves_nothing():
    scheduler = chunked()
    scheduler.admit("a", make_items(4, keys=["a"]))
    scheduler.begin()
    scheduler.look_ahead("a")
    plan = scheduler.close()
    with pytest.raises(MemoryError):
        scheduler.fail(plan, MemoryError())
    assert scheduler.cache.claimed_rows == 0
    scheduler.invalidate()


def test_a_claim_takes_the_rows_of_what_is_only_for_later():
    scheduler = chunked(rows=2)
    for name in "abc":
        scheduler.admit(name, make_items(4, keys=[name]))
    scheduler.begin()
    scheduler.look_ahead("ab")
    assert [scheduler.claim(name, 0, 5).end for name in "cb"] == [5, 5]
    plan = scheduler.close()
    assert (selected(plan), plan.look_ahead) == ({"b": [0], "c": [0]}, ())
    scheduler.commit(plan)
    assert scheduler.cache.state("a") is None
    for name in "bc":
        scheduler.remove(name)
    assert scheduler.cache.claimed_rows == 0


def test_looking_ahead_twice_before_the_first_is_dispatched_holds_one_reference():
    scheduler = chunked()
    scheduler.admit("a", make_items(4, keys=["a"]))
    plans = []
    for _ in range(2):
        scheduler.begin()
        scheduler.look_ahead("a")
        plans.append(scheduler.close())
    assert [selected(plan) for plan in plans] == [{"a": [0]}, {}]
    for plan in plans:
        scheduler.commit(plan)
    assert scheduler.cache.claimed_rows == 0
