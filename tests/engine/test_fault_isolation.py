# SPDX-License-Identifier: Apache-2.0
"""Claim: a broken promise between two parts of the engine fails the request it concerns and leaves nobody waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stub_kit import StubEngine, expected, item, talk

from mmjax.engine.mailbox import Mailbox
from mmjax.errors import EngineError, PlaceholderError, RequestError


def test_rows_and_positions_that_disagree_at_fusion_fail_one_request():
    engine = StubEngine()
    prompt = talk(2, item(1, 4), 2)
    short = replace(prompt, items=[replace(i, row_positions=i.row_positions[:-1]) for i in prompt.items])
    good, broken, behind = (engine.submit(p) for p in (talk(5, item(2, 3), 1), short, talk(4)))
    engine.run()
    error = broken.handle.wait(0).error
    assert isinstance(error, PlaceholderError)
    assert (error.request_id, error.item) == (broken.id, 0)
    assert "4 embedding rows for 3 prompt positions" in str(error)
    for request in (good, behind):
        assert request.handle.wait(0).token_ids == expected(request.prompt, 4)
    engine.assert_drained()


def test_a_request_that_breaks_its_admission_hears_of_it(monkeypatch):
    engine = StubEngine()
    admit = engine.service.items.admit

    def broken(request_id, items):
        if request_id == "r1":
            raise ZeroDivisionError("a bug")
        admit(request_id, items)

    monkeypatch.setattr(engine.service.items, "admit", broken)
    outputs = engine.run(*(engine.submit(talk(4, item(n, 2))) for n in range(3)))
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert isinstance(outputs[1].error, EngineError)
    assert "a bug" in str(outputs[1].error)
    engine.assert_drained()


def test_nothing_is_encoded_before_every_batch_is_packed():
    """With the policy "disabled" a step has several batches; the request that breaks the last one fails alone."""

    def fail(contents):
        if 3 in contents:
            raise ValueError("a broken contract")

    engine = StubEngine(fail=fail, items=1, multimodal={"encoder_scheduling_policy": "disabled"})
    good, broken = engine.submit(talk(1, item(1, 2), item(2, 2), 1)), engine.submit(talk(1, item(3, 2), 1))
    engine.step()
    assert engine.encoder.calls == []
    engine.run()
    assert engine.encoder.calls == [[1], [2]]
    assert isinstance(broken.handle.wait(0).error, RequestError)
    assert good.handle.wait(0).token_ids == expected(good.prompt, 4)
    engine.assert_drained()


def test_all_others_end_when_the_end_of_one_goes_wrong(monkeypatch):
    engine = StubEngine()
    requests = [engine.submit(talk(4), 50) for _ in range(3)]
    engine.step()
    remove = engine.scheduler.remove

    def broken(request):
        remove(request)
        if request is requests[0]:
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(engine.scheduler, "remove", broken)
    engine.engine._fail_all(EngineError("over"))
    assert [str(request.handle.wait(0).error) for request in requests] == ["over"] * 3


def test_a_message_posted_while_another_is_being_posted():
    """The garbage collector may run in the middle of a post and close a stream, which posts its cancellation."""
    box, ran = Mailbox(), []
    with box._door:
        assert box.post(lambda: ran.append("cancel"))
    box.deliver(wait=True)
    assert ran == ["cancel"]


@pytest.mark.parametrize("shut", [False, True])
def test_questions_are_answered_or_refused(shut):
    box = Mailbox()
    if shut:
        box.shut()
        assert box.ask(lambda: 1) is None
        return
    answer, error = box.ask(lambda: 7), box.ask(lambda: 1 / 0)
    box.deliver(wait=False)
    assert answer.result(0) == 7
    with pytest.raises(ZeroDivisionError):
        error.result(0)
