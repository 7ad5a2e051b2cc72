# SPDX-License-Identifier: Apache-2.0
"""Claim: a failing device costs time and no answer; beyond repair it fails those concerned, and the engine lives on."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from llm_kit import GREEDY, assert_nothing_held, clip, noise, png, serving, together, user

import mmjax
from mmjax.compilation import CompileCounter
from mmjax.errors import DeviceError, EngineError, RequestError

pytestmark = pytest.mark.timeout(300)

LONG = replace(GREEDY, max_tokens=20)
REQUESTS = [
    (user(noise(84, 140, 1), "what?"), LONG),
    (user(png(noise(150, 90, 2)), "and", clip(4, 56, 84, 3), "which?"), replace(LONG, temperature=0.9, seed=4)),
    (user("tell me a tale"), replace(LONG, repetition_penalty=1.3)),
    (user(noise(84, 140, 1), noise(56, 84, 4), "?"), LONG),
    (user("wait"), LONG),
]


@pytest.fixture(scope="module")
def alone(tiny_llm):
    answers = []
    for messages, params in REQUESTS:
        with serving(tiny_llm()) as llm:
            answers.append(llm.chat(messages, params).token_ids)
    return answers


def lose_pools(machine) -> None:
    """What a failed execution does to the arrays that were donated to it."""
    for array in [*jax.tree.leaves(machine.text.state), machine.encoder.pool]:
        array.delete()


def failing(monkeypatch, runner, method: str, calls: set[int], error: Exception, machine=None):
    """`runner.method` raises `error` in the given calls, counted from 0. Returns the list of those that came."""
    original, count, raised = getattr(runner, method), iter(range(10_000)), []

    def broken(*arguments, **options):
        call = next(count)
        if call in calls:
            raised.append(call)
            if machine is not None:
                lose_pools(machine)
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(runner, method, broken)
    return raised


def ask_all(llm) -> list[mmjax.RequestOutput]:
    with together(llm):
        handles = [llm.submit(messages, params) for messages, params in REQUESTS]
    return [handle.wait(60) for handle in handles]


@pytest.mark.parametrize(
    ("runner", "method", "call"),
    [
        ("text", "prefill", 0),
        ("text", "prefill", 1),
        ("text", "decode", 0),
        ("text", "decode", 13),
        ("text", "begin", 0),
        ("encoder", "encode", 0),
        ("encoder", "encode", 1),
    ],
)
def test_one_device_error_changes_no_answer(tiny_llm, alone, monkeypatch, runner, method, call):
    with serving(tiny_llm(), chunk_tokens=50) as llm:
        machine = llm.running.machine
        counter = CompileCounter().start()
        raised = failing(monkeypatch, getattr(machine, runner), method, {call}, DeviceError("lost"), machine)
        outs = ask_all(llm)
        counter.stop()
        assert raised == [call]
        monkeypatch.undo()
        assert [out.error for out in outs] == [None] * len(REQUESTS)
        assert [out.token_ids for out in outs] == alone
        assert counter.names == []  # the arrays are made anew without compiling
        assert_nothing_held(llm)
        assert ask_all(llm)[0].token_ids == alone[0]


def test_an_error_that_shows_when_tokens_are_read(tiny_llm, alone, monkeypatch):
    """Execution is asynchronous: the device may fail after the next step was dispatched."""
    with serving(tiny_llm()) as llm:
        engine, count = llm.running.engine, iter(range(1000))

        def collect(*, keep, original=engine._collect):
            if engine._pending and next(count) == 9:
                lose_pools(llm.running.machine)
                raise DeviceError("lost")
            return original(keep=keep)

        monkeypatch.setattr(engine, "_collect", collect)
        outs = ask_all(llm)
        monkeypatch.undo()
        assert [out.token_ids for out in outs] == alone


def test_a_second_error_much_later_is_survived_too(tiny_llm, alone, monkeypatch):
    with serving(tiny_llm()) as llm:
        raised = failing(monkeypatch, llm.running.machine.text, "decode", {3, 12, 21}, DeviceError("lost"))
        outs = ask_all(llm)
        monkeypatch.undo()
        assert raised == [3, 12, 21]
        assert [out.token_ids for out in outs] == alone


def test_twice_in_a_row_is_once_too_often(tiny_llm, alone, monkeypatch):
    """All fail with the device's error; those who come later are served, with a retry of their own."""
    with serving(tiny_llm()) as llm:
        machine = llm.running.machine
        failing(monkeypatch, machine.text, "prefill", {0, 1, 3}, DeviceError("lost for good"), machine)
        outs = ask_all(llm)
        assert [out.finish_reason for out in outs] == ["error"] * len(REQUESTS)
        assert {type(out.error) for out in outs} == {DeviceError}
        assert_nothing_held(llm)
        assert llm.chat(*REQUESTS[2]).token_ids == alone[2]  # call 2
        assert llm.chat(*REQUESTS[0]).token_ids == alone[0]  # calls 3 and 4
        monkeypatch.undo()
        with pytest.raises(DeviceError, match="lost for good"):
            raise outs[0].error


def test_a_stream_raises_where_the_device_fails(tiny_llm, monkeypatch):
    with serving(tiny_llm()) as llm:
        failing(monkeypatch, llm.running.machine.text, "decode", set(range(4, 100)), DeviceError("lost"))
        stream, read = llm.stream(*REQUESTS[0]), []
        with pytest.raises(DeviceError):
            read.extend(stream)
        monkeypatch.undo()
        assert 1 <= len(read) < 20
        assert len(list(llm.stream(*REQUESTS[2]))) == 20


def test_rows_alone_survive_a_device_error(tiny_llm, monkeypatch):
    pictures = [noise(200, 200, i) for i in range(5)]
    with serving(tiny_llm(), budgets={"batch_size": 1}) as llm:
        clean = llm.encode(pictures)
    with serving(tiny_llm(), budgets={"batch_size": 1}) as llm:
        machine = llm.running.machine
        raised = failing(monkeypatch, machine.encoder, "encode", {0, 3}, DeviceError("lost"), machine)
        rows = llm.encode(pictures)
        monkeypatch.undo()
        assert raised == [0, 3]
        assert_nothing_held(llm)
    for ours, theirs in zip(rows, clean, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_item_that_can_not_be_packed_fails_its_own_request(tiny_llm, alone, monkeypatch):
    """Others in the same encoder call, and a request that shares no item, get their answers."""
    with serving(tiny_llm()) as llm:
        encoder = llm.running.machine.encoder

        def pack(items, bucket, original=encoder.pack):
            if any(item.plan.grid == (1, 2, 14) for item in items):  # 28 x 196 pixels
                raise ValueError("a broken contract")
            return original(items, bucket)

        monkeypatch.setattr(encoder, "pack", pack)
        with together(llm):
            handles = [llm.submit(messages, params) for messages, params in REQUESTS]
            broken = llm.submit(user(noise(28, 196, 99), "?"), LONG)
        outs = [handle.wait(60) for handle in handles]
        monkeypatch.undo()
        assert [out.token_ids for out in outs] == alone
        error = broken.wait(60).error
        assert isinstance(error, RequestError)
        assert error.request_id == broken.request_id
        assert "a broken contract" in str(error)
        assert_nothing_held(llm)


def test_a_failure_of_the_producer_leaves_a_sharer_alone(tiny_llm, alone, monkeypatch):
    with serving(tiny_llm()) as llm:
        raised = failing(monkeypatch, llm.running.machine.encoder, "pack", {0, 1}, ValueError("once"))
        with together(llm):
            producer, sharer = llm.submit(*REQUESTS[0]), llm.submit(*REQUESTS[0])
        assert isinstance(producer.wait(60).error, RequestError)
        assert sharer.wait(60).token_ids == alone[0]
        assert raised == [0, 1]  # the batch, and then each item of it to see whose fault it is
        monkeypatch.undo()
        assert_nothing_held(llm)


@pytest.mark.parametrize(
    ("runner", "method", "call"), [("text", "prefill", 1), ("text", "decode", 5), ("encoder", "encode", 0)]
)
def test_a_failure_that_nobody_foresaw(tiny_llm, alone, monkeypatch, runner, method, call):
    """Those who run fail with the engine's error, nothing leaks, and the next requests are served."""
    with serving(tiny_llm(), multimodal={"encoder_scheduling_policy": "eager"}) as llm:
        failing(monkeypatch, getattr(llm.running.machine, runner), method, {call}, ZeroDivisionError("a bug"))
        outs = ask_all(llm)
        monkeypatch.undo()
        assert {type(out.error) for out in outs if out.error is not None} == {EngineError}
        assert any("a bug" in str(out.error) for out in outs)
        assert_nothing_held(llm)
        assert llm.running.call(lambda: llm.running.items._ahead) == set()
        assert [out.token_ids for out in ask_all(llm)] == alone


def test_a_call_that_fails_raises_in_its_own_thread(llm, alone):
    with pytest.raises(ZeroDivisionError):
        llm.running.call(lambda: 1 / 0)
    assert llm.chat(*REQUESTS[0]).token_ids == alone[0]
