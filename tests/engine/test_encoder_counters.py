# SPDX-License-Identifier: Apache-2.0
"""Claim: a step encodes what is missing, all of it in one call, and nothing twice; counters tell."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from inputs_kit import broken_rows
from stub_kit import PLAIN, StubEngine, expected, item, row_value, talk

from mmjax.encoder.budgets import resolve_budgets


def engine_of(**options) -> StubEngine:
    """An engine without prefix reuse, so that every picture counts."""
    return StubEngine(**({"enable_block_reuse": False} | options))


def served(engine: StubEngine, *prompts) -> list[list[int]]:
    """Runs prompts together; returns the encoder calls that they took."""
    before = len(engine.encoder.calls)
    requests = [engine.submit(prompt) for prompt in prompts]
    for request, output in zip(requests, engine.run(*requests), strict=True):
        assert output.token_ids == expected(request.prompt, 4)
    engine.assert_drained()
    return engine.encoder.calls[before:]


def cache(engine: StubEngine):
    return engine.service.items.cache.stats()


def test_text_takes_no_call():
    assert served(engine_of(), talk(5), talk(9)) == []


def test_three_pictures_take_one_call_and_are_then_known():
    engine = engine_of()
    prompts = [talk(1, item(n, rows), 1) for n, rows in ((1, 5), (2, 8), (3, 7))]
    assert served(engine, *prompts) == [[1, 2, 3]]
    assert engine.text.rows_per_step[0] == 20
    assert cache(engine).current_bytes == 20 * 4
    assert served(engine, *prompts) == []
    assert sum(engine.text.rows_per_step) == 40


def test_between_two_known_pictures_only_the_middle_is_encoded():
    engine = engine_of()
    served(engine, talk(item(1, 5), 1), talk(item(3, 7), 1))
    calls = served(engine, talk(item(1, 5), 1), talk(item(2, 8), 1), talk(item(3, 7), 1))
    assert calls == [[2]]
    assert [r.metrics.items_encoded for r in engine.requests[-3:]] == [0, 1, 0]
    assert [r.metrics.items_cached for r in engine.requests[-3:]] == [1, 0, 1]


def test_special_positions_take_no_rows():
    """Spans of 10, 8 and 6 positions, of which 2, 1 and 3 are special."""
    engine = engine_of()
    plans = [broken_rows(2, 4), broken_rows(1, 7), broken_rows(3, 1)]
    assert [plan.span_ids.size for plan in plans] == [10, 8, 6]
    assert served(engine, *[talk(1, item(n, plan=p), 1, processor=PLAIN) for n, p in enumerate(plans)]) == [[0, 1, 2]]
    assert engine.text.rows_per_step[0] == 8 + 7 + 3


def test_four_known_rows_and_nine_new_ones():
    engine = engine_of()
    served(engine, talk(item(1, 4), 1))
    assert served(engine, talk(item(1, 4), 2, item(2, 9), 1)) == [[2]]
    assert engine.text.rows_per_step == [4, 13]


def test_two_items_are_two_entries_of_one_call():
    engine = engine_of()
    assert served(engine, talk(item(1), item(2), 1)) == [[1, 2]]
    stats = cache(engine)
    assert (stats.items, stats.insertions, stats.misses) == (2, 2, 2)


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_known_picture_is_not_written_again(chunk):
    engine = engine_of(chunk=chunk)
    prompt = talk(2, item(1), 2, item(2), 1)
    served(engine, prompt)
    before = cache(engine)
    assert served(engine, prompt, prompt) == []
    after = cache(engine)
    assert (after.insertions, after.replacements, after.current_bytes) == (before.insertions, 0, before.current_bytes)
    assert after.hits == 4


def test_without_a_cache_every_request_encodes_its_own():
    engine = engine_of(retain=False)
    prompt = talk(2, item(1), 2)
    assert served(engine, prompt) == [[1]]
    assert cache(engine).items == 0
    assert served(engine, prompt) == [[1]]
    assert served(engine, prompt, prompt) == [[1]], "those in flight together still share"


def test_supplied_rows_are_used_as_they_are():
    engine = engine_of()
    rows = np.full((6, 1), 99)
    given = replace(item(5, digest="ab" * 32), patches=None, embedding=rows)
    assert served(engine, talk(1, given, 1), talk(1, item(2), 1)) == [[2]]
    assert (engine.encoder.pool == 99).sum() == 6
    stats = engine.service.items.stats()
    assert (stats["items_encoded"], cache(engine).items) == (1, 2)
    assert [request.metrics.items_encoded for request in engine.requests] == [0, 1]
    assert served(engine, talk(2, given, 1)) == []


def test_a_partial_hit_encodes_the_rest_and_keeps_the_order():
    engine = engine_of()
    assert served(engine, talk(item(1, 4), 1)) == [[1]]
    request = engine.submit(talk(1, item(1, 4), 1, item(2, 6), 1, item(1, 4), 1))
    engine.step()
    slots = [engine.service.items.cache.slots(p.cache_key) for p in request.prompt.items]
    rows = [engine.encoder.pool[s].tolist() for s in slots]
    assert rows == [[row_value(n, i) for i in range(size)] for n, size in ((1, 4), (2, 6), (1, 4))]
    engine.run()
    engine.assert_answers()
    assert engine.encoder.calls == [[1], [2]]


def test_two_partial_hits_take_one_call_more():
    engine = engine_of()
    served(engine, talk(item(1), item(2), 1))
    assert served(engine, talk(item(1), item(3), 1), talk(item(2), item(4), 1)) == [[3, 4]]
    assert cache(engine).items == 4


def test_three_pictures_of_which_two_are_known():
    engine = engine_of()
    served(engine, talk(item(1), item(2), 1))
    assert served(engine, talk(item(1), 1, item(2), 1, item(3), 1)) == [[3]]


def test_ten_requests_with_one_picture_encode_it_once():
    engine = engine_of(batch=10, chunk=200)
    assert served(engine, *[talk(n + 1, item(1), 2) for n in range(10)]) == [[1]]
    assert cache(engine).inflight_dedup == 9


def test_one_picture_three_times_whoever_ends_first():
    """A, B, A and a second request with A: each is encoded once and let go once."""
    for tokens in itertools.permutations((2, 9)):
        engine = engine_of()
        for prompt, count in zip((talk(item(1), 1, item(2), 1, item(1), 1), talk(2, item(1), 1)), tokens, strict=True):
            engine.submit(prompt, count)
        engine.run()
        engine.assert_answers()
        engine.assert_drained()
        assert engine.encoder.calls == [[1, 2]]


def test_options_are_part_of_the_name():
    engine = engine_of()
    plain, other = item(1), item(1, plan=replace(item(1).plan, options={"max_pixels": 9}))
    assert served(engine, talk(plain, 1), talk(other, 1)) == [[1, 1]]
    assert cache(engine).items == 2


@pytest.mark.parametrize(
    "nameless",
    [item(1, digest=None), item(1, plan=replace(item(1).plan, options={"f": object()}))],
    ids=["no digest", "options without a form"],
)
def test_what_has_no_name_is_kept_for_nobody(nameless):
    engine = StubEngine()
    assert served(engine, talk(9, nameless, 1)) == [[1]]
    assert cache(engine).items == 0
    assert served(engine, talk(9, nameless, 1), talk(9, nameless, 1)) == [[1, 1]]
    assert engine.service.pages.stats().reused_tokens == 0


def test_a_full_cache_gives_up_the_oldest():
    engine = engine_of(rows=12)
    for content in (1, 2, 1, 3):  # 2 goes for 3
        served(engine, talk(item(content), 1))
    assert cache(engine).evictions == 1
    assert served(engine, talk(item(1), 1)) == []
    assert served(engine, talk(item(2), 1)) == [[2]]


def test_items_beyond_a_budget_take_the_next_step():
    engine = engine_of(items=2)
    assert served(engine, talk(item(1), item(2), item(3), 1)) == [[1, 2], [3]]
    engine = engine_of(tokens=24 + 23)  # 24 a picture
    assert served(engine, talk(item(1), 1), talk(item(2), 1)) == [[1], [2]]


def test_the_policy_without_budgets_takes_all_calls_at_once():
    engine = engine_of(items=2, multimodal={"encoder_scheduling_policy": "disabled"})
    assert served(engine, talk(item(1), item(2), item(3), 1)) == [[1, 2], [3]]
    assert engine.text.rows_per_step[0] == 18


def test_rows_alone_come_through_the_same_cache():
    engine = engine_of(rows=14)
    prompt = talk(*[item(n) for n in range(5)])
    request = engine.submit(prompt, embed_only=True)
    engine.run()
    assert [rows[:, 0].tolist() for rows in request.rows] == [[row_value(n, i) for i in range(6)] for n in range(5)]
    assert served(engine, talk(item(4), 1)) == []
    engine.assert_drained()


def test_bytes_of_the_cache_are_rows_of_the_pool():
    """4096 bytes hold 256 rows of 4 float32."""
    cfg = SimpleNamespace(dtype="float32", row_width=4, merge=4, window_capacity=0)
    processor = SimpleNamespace(max_tokens_per_item=lambda: {"image": 16})
    budgets = resolve_budgets(processor, cfg, max_batch_size=8, max_num_tokens=16, encoder_cache_max_bytes=4096)
    assert budgets.capacity_rows == 256
