# SPDX-License-Identifier: Apache-2.0
"""Claim: requests that wait for all of their items are admitted, gated and served under budgets A, B and C."""

from __future__ import annotations

import pytest
from encoder_kit import PROMPT, make_budgets, make_items, make_ladder, make_scheduler, select

from mmjax.encoder.admission import check_limits, check_payload
from mmjax.encoder.buckets import EncoderLoad
from mmjax.encoder.plan import Refusal
from mmjax.encoder.state import EncoderItem
from mmjax.errors import RequestError
from mmjax.inputs.params import MultimodalEncoderItemMetadata


def admit(scheduler, *requests):
    """Requests "1", "2", ... with items of the given costs."""
    for i, costs in enumerate(requests, 1):
        scheduler.admit(str(i), make_items(*costs))


def test_a_prefix_of_one_request_and_all_of_another():
    scheduler = make_scheduler(items=2, tokens=10)
    admit(scheduler, [7, 7], [3])
    assert select(scheduler, "1", "2")[:2] == ({"1": [0], "2": [0]}, ["2"])


def test_one_picture_in_two_requests_is_encoded_once():
    scheduler = make_scheduler(tokens=8)
    for request_id in "12":
        scheduler.admit(request_id, make_items(8, keys=["same"]))
    items, ready, plan = select(scheduler, "1", "2")
    assert (items, ready) == ({"1": [0]}, ["1", "2"])
    assert scheduler.cache.stats().inflight_dedup == 1
    assert sorted(scheduler.commit(plan)) == [("1", 0), ("2", 0)]


def test_rows_for_one_of_two():
    scheduler = make_scheduler(rows=1)
    admit(scheduler, [3], [3])
    assert select(scheduler, "1", "2")[:2] == ({"1": [0]}, ["1"])


def test_a_holder_blocks_until_it_lets_go():
    scheduler = make_scheduler(rows=1, retain=False)
    admit(scheduler, [3], [3])
    scheduler.commit(select(scheduler, "1")[2])
    items, ready, _ = select(scheduler, "2")
    assert (items, ready) == ({}, [])
    scheduler.remove("1")
    assert scheduler.cache.stats().items == 0
    assert select(scheduler, "2")[:2] == ({"2": [0]}, ["2"])


def test_the_head_claims_all_of_its_rows_at_once():
    scheduler = make_scheduler(tokens=5, rows=2)
    admit(scheduler, [5, 5], [3])
    assert select(scheduler, "1", "2")[:2] == ({"1": [0]}, [])
    assert scheduler.cache.claimed_rows == 2


@pytest.mark.parametrize(
    ("budget", "costs", "chosen", "ready"),
    [((2, 10), [6, 4], [0, 1], True), ((2, 4), [1, 1, 1, 1], [0, 1], False), ((3, 10), [6, 4, 1], [0, 1], False)],
)
def test_selection_stops_at_the_first_item_over_budget(budget, costs, chosen, ready):
    scheduler = make_scheduler(items=budget[0], tokens=budget[1])
    admit(scheduler, costs)
    items, able, _ = select(scheduler, "1")
    assert (items, able) == ({"1": chosen}, ["1"] if ready else [])


def test_text_passes_and_costs_nothing():
    scheduler = make_scheduler()
    scheduler.admit("text", [])
    items, ready, plan = select(scheduler, "text")
    assert (items, ready, bool(plan)) == ({}, ["text"], False)


def test_eager_encodes_before_the_language_model_has_room():
    scheduler = make_scheduler("eager")
    admit(scheduler, [3])
    items, ready, _ = select(scheduler, "1", "text")
    has_pages = {"text"}
    assert items == {"1": [0]}
    assert [request_id for request_id in ready if request_id in has_pages] == ["text"]


def test_disabled_takes_as_many_batches_as_it_needs():
    scheduler = make_scheduler("disabled", items=2, tokens=10)
    admit(scheduler, [7, 7, 3], [1])
    items, ready, plan = select(scheduler, "1", "2")
    assert (items, ready) == ({"1": [0, 1, 2], "2": [0]}, ["1", "2"])
    assert [[item.load.tokens for item in batch.items] for batch in plan.batches] == [[7], [7, 3], [1]]


def test_costs_are_those_of_admission():
    scheduler = make_scheduler(tokens=8)
    items = make_items(3)
    scheduler.admit("1", items)
    items[0] = items[0]._replace(load=EncoderLoad(1, 100, 1, 0, 1))
    assert select(scheduler, "1")[:2] == ({"1": [0]}, ["1"])


def test_what_nothing_will_be_produced_for_is_not_claimed():
    scheduler = make_scheduler(tokens=8)
    admit(scheduler, [8], [4])
    select(scheduler, "1", "2")
    assert not scheduler.holds_rows("2")
    assert scheduler.stats()["refused_budget"] == 1


def test_items_that_the_prefix_cache_served_are_not_encoded():
    scheduler = make_scheduler()
    admit(scheduler, [3, 3, 3])  # at positions 0, 1, 2
    plan = scheduler.plan([("1", 1, PROMPT)])
    assert [item.item for item in plan.items] == [1, 2]
    scheduler.commit(plan)
    assert scheduler.plan([("1", 3, PROMPT)]).chunk_end == {"1": PROMPT}


def test_an_item_without_pixels_waits_for_them():
    scheduler = make_scheduler()
    admit(scheduler, [3, 3])
    scheduler.set_pixels("1", 1, False)
    plan = scheduler.plan([("1", 0, PROMPT)])
    assert (plan.chunk_end, plan.lacking_pixels) == ({"1": 0}, (("1", 1),))
    scheduler.commit(plan)
    assert scheduler.lacking_pixels("1", 0) == [1]
    scheduler.set_pixels("1", 1, True)
    assert scheduler.plan([("1", 0, PROMPT)]).chunk_end == {"1": PROMPT}


def test_rows_are_kept_until_the_last_item_is_prefilled():
    scheduler = make_scheduler()
    admit(scheduler, [3, 3])
    scheduler.commit(select(scheduler, "1")[2])
    scheduler.advance("1", 1)
    assert scheduler.cache.claimed_rows == 2
    scheduler.advance("1", 2)
    assert scheduler.cache.claimed_rows == 0


# Admission.


def refusal(items, **budgets) -> str:
    with pytest.raises(RequestError) as caught:
        check_limits("1", items, make_budgets(**budgets), make_ladder())
    return str(caught.value)


def test_an_item_over_the_largest():
    error = refusal(make_items(8, 9), tokens=8)
    assert "exceeding the effective startup maximum 8" in error
    assert "9 encoder tokens for item 1" in error


def test_rows_over_the_output_budget():
    error = refusal(make_items(1, 1, 1), rows=5, output_rows=2, tokens=7)
    for words in ("12 bytes", "is 8;", "raise encoder_max_num_tokens", "Multimodal request 1"):
        assert words in error
    assert "effective encoder_max_num_tokens is 7" in error


def test_chunks_lift_the_limit_on_the_whole_but_not_on_one_item():
    scheduler = make_scheduler(rows=2, readiness="chunk")
    scheduler.admit("long", make_items(1, 1, 1))
    assert "3 rows for item 0, the row pool has 2" in refusal(make_items(1, rows=3), rows=2, readiness="chunk")


def test_an_item_with_more_segments_than_any_bucket():
    item = EncoderItem(None, EncoderLoad(1, 8, contexts=101, windows=5, rows=2), 0, 1)
    assert "101 attention contexts, 5 window rows" in refusal([item])


def metadata(tokens, rows):
    return MultimodalEncoderItemMetadata([("image", i) for i in range(len(rows))], tokens, rows)


def payload(**changes):
    fields = {
        "image": {},
        "multimodal_encoder_item_metadata": metadata([4, 8], [1, 2]),
        "multimodal_embedding_lengths": [1, 2],
    }
    return {key: value for key, value in (fields | changes).items() if value is not None}


ITEMS = make_items(4, 8, rows=[1, 2])


def test_raw_media_are_for_the_encoder_unless_embeddings_are_given():
    assert check_payload("1", payload(), ITEMS, [1, 3])
    assert not check_payload("1", payload(multimodal_embedding=[0]), ITEMS, [1, 3])
    assert not check_payload("1", {"mrope_config": {}}, [])
    assert not check_payload("1", None, [])


@pytest.mark.parametrize(
    ("changes", "lengths", "words"),
    [
        ({"multimodal_encoder_item_metadata": None}, [1, 2], "requires multimodal_encoder_item_metadata"),
        ({"multimodal_encoder_item_metadata": metadata([], [])}, [], "requires multimodal_encoder_item_metadata"),
        ({"multimodal_encoder_item_metadata": metadata([4, 9], [1, 2])}, [1, 2], r"\(9, 2\)"),
        ({"multimodal_embedding_lengths": [1, 3]}, [1, 3], r"\[1, 3\]"),
        ({"multimodal_embedding_lengths": None}, [1, 2], "None"),
        ({}, [1], r"multimodal_lengths \[1\]"),
        ({}, [1, 1], r"multimodal_lengths \[1, 1\]"),
    ],
)
def test_payloads_that_disagree_with_themselves(changes, lengths, words):
    with pytest.raises(RequestError, match=words) as caught:
        check_payload("1", payload(**changes), ITEMS, lengths)
    assert caught.value.request_id == "1"


def test_a_payload_must_be_a_dict():
    with pytest.raises(TypeError, match="multimodal_data must be a dict"):
        check_payload("1", [1], ITEMS)


# The gate of the waiting queue.


def loads(*costs):
    return [item.load for item in make_items(*costs)]


def gate_of(scheduler, active, *waiting):
    return scheduler.gate(active, waiting)


def test_ready_requests_cost_nothing():
    scheduler = make_scheduler(tokens=8)
    admit(scheduler, [8])
    assert gate_of(scheduler, ["1"], loads(8)) == 0
    scheduler.commit(select(scheduler, "1")[2])
    assert gate_of(scheduler, ["1"], loads(8)) == 1


def test_pending_items_of_active_requests_count_as_admitted():
    scheduler = make_scheduler(tokens=8)
    admit(scheduler, [4])
    assert gate_of(scheduler, ["1"], loads(4)) == 1
    assert gate_of(scheduler, ["1"], loads(5)) == 0
    assert gate_of(scheduler, ["1"], loads(2), loads(2), None, loads(1)) == 3


def test_what_validation_will_refuse_does_not_block():
    scheduler = make_scheduler(tokens=8)
    assert gate_of(scheduler, [], loads(9), None) == 2
    assert gate_of(scheduler, [], None, loads(8)) == 2


def test_a_lone_head_over_the_budget_passes():
    scheduler = make_scheduler(items=1, tokens=8)
    assert gate_of(scheduler, [], loads(1, 1), loads(1)) == 1
    assert gate_of(scheduler, [], loads(6, 6)) == 1
    admit(scheduler, [1])
    assert gate_of(scheduler, ["1"], loads(1, 1)) == 0


def test_chunks_need_no_gate():
    scheduler = make_scheduler(items=1, tokens=8, readiness="chunk")
    assert gate_of(scheduler, [], loads(8), loads(8), loads(8)) == 3


def test_why_a_claim_stops():
    scheduler = make_scheduler(tokens=5, rows=3)
    admit(scheduler, [5, 5], [1, 1], [1])
    scheduler.begin()
    claims = [scheduler.claim(request_id, 0, PROMPT) for request_id in "123"]
    assert claims == [(0, Refusal.BUDGET), (0, Refusal.ROWS), (0, Refusal.BUDGET)]
