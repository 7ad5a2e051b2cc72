# SPDX-License-Identifier: Apache-2.0
"""Claim: what is too large is refused, everything else ends, however small the pools and whoever leaves when."""

from __future__ import annotations

import numpy as np
import pytest
from inputs_kit import broken_rows
from stub_kit import PLAIN, StubEngine, expected, item, talk

from mmjax.engine import scheduler
from mmjax.engine.embedding import encoder_item
from mmjax.errors import DeviceError, EngineError, RequestError


def end(request):
    return request.handle.wait(0)


# One item larger than a budget.


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        ({"tokens": 8}, ("16", "8")),
        ({"rows": 3}, ("4 rows", "has 3")),
        ({"rows": 3, "readiness": "request"}, ("4 rows", "has 3")),
    ],
    ids=["tokens", "rows", "rows of a whole request"],
)
def test_an_item_over_a_budget_is_refused_and_the_queue_moves_on(limits, numbers):
    """16 attention tokens, 4 rows."""
    engine = StubEngine(**limits)
    refused = engine.submit(talk(2, item(1, 4), 2))
    behind = [engine.submit(talk(9)), engine.submit(talk(1, item(2, 2), 3))]
    for _ in range(5):
        engine.step()
    error = end(refused).error
    assert isinstance(error, RequestError)
    assert (error.item, error.request_id) == (0, "r0")
    for number in numbers:
        assert number in str(error)
    for request in behind:
        assert end(request).token_ids == expected(request.prompt, 4)
    engine.assert_drained()


def test_all_items_of_a_request_at_once_are_refused_only_where_they_must_fit_at_once():
    film = talk(*[part for n in range(6) for part in (item(n, 4), 1)])
    engine = StubEngine(rows=10, readiness="request")
    (output,) = engine.run(engine.submit(film))
    assert "needs 96 bytes" in str(output.error)
    engine = StubEngine(rows=10)
    assert engine.answer(film) == expected(film, 4)


def test_rows_count_and_not_positions():
    """A span of 10 positions with 8 rows fits a pool of 8."""
    prompt = talk(1, item(1, plan=broken_rows(2, 4)), 1, processor=PLAIN)
    assert StubEngine(rows=8).answer(prompt) == expected(prompt, 4)
    engine = StubEngine(rows=7)
    (output,) = engine.run(engine.submit(prompt))
    assert "8 rows for item 0, the row pool has 7" in str(output.error)


# Small caches.


@pytest.mark.parametrize("readiness", ["chunk", "request"])
def test_what_was_encoded_for_later_gives_way(readiness):
    """Room for 2 items; two requests in line are encoded ahead, then one that runs needs a third."""
    engine = StubEngine(
        rows=8, batch=1, readiness=readiness, chunk=4, multimodal={"encoder_scheduling_policy": "eager"}
    )
    prompts = [talk(8, item(n, 4), 1) for n in (1, 2, 3)]
    for prompt in prompts:
        engine.submit(prompt, 6)
    engine.run()
    engine.assert_answers()
    engine.assert_drained()
    assert len(engine.encoder.encoded) <= 3 + 2


def test_look_ahead_is_bounded_by_the_knob():
    engine = StubEngine(chunk=2, batch=2, multimodal={"encoder_side_stream_max_ahead": 2})
    for n in (1, 2, 3):
        engine.submit(talk(8, item(n, 4), 1))
    engine.step()
    assert sorted(engine.encoder.encoded) == [1, 2]
    engine.run()
    engine.assert_answers()
    assert sorted(engine.encoder.encoded) == [1, 2, 3]


@pytest.mark.parametrize("readiness", ["chunk", "request"])
@pytest.mark.parametrize("seed", range(6))
def test_a_cache_of_one_item_serves_anybody(seed, readiness):
    """Requests over 6 images in random chunks, some cancelled; every answer is that of a cold run."""
    rng = np.random.default_rng(seed)
    engine = StubEngine(
        rows=6,
        page=int(rng.integers(1, 6)),
        blocks=120,
        readiness=readiness,
        disable_overlap_scheduler=bool(seed % 2),
    )
    images = [item(n, 6, columns=int(rng.choice([2, 3, 6]))) for n in range(6)]
    alive = []
    for _ in range(100):
        count = 1 if readiness == "request" else int(rng.integers(0, 3))
        parts = [part for _ in range(count) for part in (int(rng.integers(1, 5)), images[rng.integers(6)])]
        alive.append(engine.submit(talk(*parts, int(rng.integers(1, 6))), int(rng.integers(1, 6))))
        for _ in range(rng.integers(0, 4)):
            object.__setattr__(engine.service.config, "chunk_tokens", int(rng.integers(1, 20)))
            engine.step()
        if rng.random() < 0.2:
            engine.service.cancel(alive[rng.integers(len(alive))].id)
    engine.run(limit=20_000)
    engine.assert_answers()
    engine.assert_drained()
    assert sum(end(request).finish_reason == "length" for request in alive) > 60


def test_a_step_looks_no_further_into_the_queue_than_it_has_slots(monkeypatch):
    looked = []
    monkeypatch.setattr(scheduler, "encoder_item", lambda placed: looked.append(placed) or encoder_item(placed))
    engine = StubEngine(batch=3, chunk=8, blocks=200)
    for n in range(200):
        engine.submit(talk(1, item(n % 5, 3), 2), 2)
    for _ in range(20):
        looked.clear()
        engine.step()
        assert len(looked) <= 3
    engine.run()
    engine.assert_answers()
    started = [request_id for row in engine.engine.trace.rows for request_id, *_ in row.chunks]
    assert list(dict.fromkeys(started)) == [f"r{n}" for n in range(200)], "first come, first served"


def test_nobody_passes_the_head_of_the_queue():
    """A large prompt waits for pages; a stream of small ones behind it would take them for ever."""
    engine = StubEngine(page=4, blocks=10, chunk=40, batch=8)
    engine.submit(talk(15), 8)
    engine.step()
    head = engine.submit(talk(30, item(1, 3)), 2)
    for _ in range(30):
        engine.submit(talk(3), 6)
        engine.step()
        assert head.computed or all(request.computed == 0 for request in engine.requests[2:])
    engine.run()
    engine.assert_answers()


# Preemption after pixels were dropped.


@pytest.mark.parametrize("reuse", [True, False], ids=["pages kept", "pages gone"])
@pytest.mark.parametrize("readiness", ["chunk", "request"])
def test_preempted_in_any_step(readiness, reuse):
    prompt, step, restored = talk(3, item(1, 6, columns=3), 4, item(2, 4), 2), 0, set()
    while True:
        step += 1
        engine = StubEngine(chunk=5, readiness=readiness, enable_block_reuse=reuse)
        request = engine.submit(prompt, 6)
        for _ in range(step):
            engine.step()
        if request.handle.done:
            break
        engine.scheduler.preempt(request)
        engine.service.items.invalidate()  # rows are gone too
        engine.run()
        engine.assert_answers()
        engine.assert_drained()
        assert max(engine.encoder.encoded.count(content) for content in (1, 2)) <= 2
        restored |= set(engine.restored)
    assert step > 8
    assert restored == {1, 2}


@pytest.mark.parametrize("blocks", range(9, 20))
def test_pages_for_less_than_all(blocks):
    """Three requests, each of which fits alone."""
    engine = StubEngine(page=3, blocks=blocks, chunk=7, rows=20)
    for n in range(3):
        engine.submit(talk(2, item(n, 6, columns=2), 3, item(n + 1, 4), 2), 9)
    engine.run(limit=5_000)
    engine.assert_answers()
    engine.assert_drained()
    assert engine.scheduler.preemptions > 0


# Failures.


@pytest.mark.parametrize("broken", range(8))
def test_a_bad_item_fails_one_request_of_eight(broken):
    def fail(contents):
        if broken in contents:
            raise ValueError("rows and grid disagree")

    engine = StubEngine(batch=8, fail=fail)
    requests = [engine.submit(talk(2, item(n), 2)) for n in range(8)]
    engine.run()
    for n, request in enumerate(requests):
        output = end(request)
        if n == broken:
            assert isinstance(output.error, RequestError)
            assert output.error.request_id == request.id
        else:
            assert output.token_ids == expected(request.prompt, 4)
    engine.assert_drained()


def test_a_failure_falls_on_producers_and_the_sharer_succeeds_in_the_next_step():
    tries = []

    def fail(contents):
        tries.append(contents)
        if len(tries) <= 1:
            raise ValueError("this time only")

    engine = StubEngine(fail=fail)
    ready = engine.submit(talk(40))  # prefills over two steps
    producer, sharer = engine.submit(talk(item(1), 2)), engine.submit(talk(1, item(1), 2))
    engine.step()
    assert isinstance(end(producer).error, RequestError)
    assert ready.computed == 40, "what needs no rows goes on in the same step"
    assert not sharer.handle.done
    engine.step()
    assert sharer.computed == sharer.prompt_len
    engine.run()
    assert end(sharer).token_ids == expected(sharer.prompt, 4)
    assert end(ready).token_ids == expected(ready.prompt, 4)
    engine.assert_drained()


def test_requests_with_their_rows_go_on_while_another_fails():
    engine = StubEngine(chunk=16, fail=lambda contents: _raise(ValueError("bad")) if 9 in contents else None)
    running = engine.submit(talk(item(1, 6), 30), 5)
    engine.step()
    failing, text = engine.submit(talk(item(9), 2)), engine.submit(talk(3))
    engine.run()
    assert isinstance(end(failing).error, RequestError)
    for request, tokens in ((running, 5), (text, 4)):
        assert end(request).token_ids == expected(request.prompt, tokens)
    engine.assert_drained()


def _raise(error):
    raise error


def test_a_device_error_starts_everybody_again_once():
    engine = StubEngine(chunk=6)
    encode, failures = engine.encoder.encode, []

    def broken(*arguments):
        if not failures:
            failures.append(1)
            raise DeviceError("out of memory")
        encode(*arguments)

    engine.encoder.encode = broken
    for n in range(3):
        engine.submit(talk(2, item(n), 3))
    engine.run()
    engine.assert_answers()
    engine.assert_drained()


def test_a_device_that_stays_broken_fails_everybody_with_a_reason():
    engine = StubEngine()
    engine.encoder.encode = lambda *_: _raise(DeviceError("gone"))
    requests = [engine.submit(talk(2, item(n), 3)) for n in range(3)]
    engine.run()
    for request in requests:
        assert isinstance(end(request).error, EngineError)
    engine.encoder.encode = type(engine.encoder).encode.__get__(engine.encoder)
    prompt = talk(2, item(7), 3)
    assert engine.answer(prompt) == expected(prompt, 4)
    engine.assert_drained()


@pytest.mark.parametrize("steps", range(1, 9))
def test_cancelled_in_any_step(steps):
    """Three pictures; of those that no chunk has reached none is encoded."""
    engine = StubEngine(chunk=4)
    request = engine.submit(talk(1, item(1), 1, item(2), 1, item(3), 1))
    for _ in range(steps):
        engine.step()
    reached = sum(first < request.computed for first in (1, 8, 15))
    assert engine.encoder.encoded == [1, 2, 3][:reached]
    engine.service.cancel(request.id)
    engine.run()
    assert end(request).finish_reason in ("cancelled", "length")
    assert engine.encoder.encoded == [1, 2, 3][:reached]
    engine.assert_drained()
