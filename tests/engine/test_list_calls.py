# SPDX-License-Identifier: Apache-2.0
"""Claim: a list call prepares several requests at a time, submits them in order, and leaves nothing behind."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from mmjax.engine.handle import Handle
from mmjax.errors import EngineError, RequestError
from mmjax.list_calls import answers
from mmjax.outputs import RequestOutput


def _request(name: str, cancelled: list[str]) -> SimpleNamespace:
    return SimpleNamespace(id=name, handle=Handle(name, cancelled.append))


def _finish(request: SimpleNamespace) -> None:
    request.handle.finish(
        RequestOutput(request_id=request.id, text="", token_ids=[], prompt_token_ids=[], finish_reason="stop")
    )


def test_requests_are_made_at_once_and_submitted_in_order():
    both_busy = threading.Barrier(2, timeout=10)
    submitted = []

    def make(name):
        both_busy.wait()  # passes only if two are being made at the same time
        return _request(name, [])

    def submit(request):
        submitted.append(request.id)
        _finish(request)

    outputs = answers([lambda name=name: make(name) for name in "abcd"], submit, threads=2)
    assert submitted == list("abcd")
    assert [output.request_id for output in outputs] == list("abcd")


def test_a_request_that_cant_be_made_is_an_output_and_the_others_go_on():
    def fail():
        raise RequestError("too long", request_id="b")

    makers = [lambda: _request("a", []), fail, lambda: _request("c", [])]
    outputs = answers(makers, _finish, threads=2)
    assert [output.request_id for output in outputs] == ["a", "b", "c"]
    assert [output.finish_reason for output in outputs] == ["stop", "error", "stop"]
    assert "too long" in str(outputs[1].error)
    assert answers([], _finish, threads=2) == []


def test_any_other_error_cancels_what_was_submitted():
    cancelled = []

    def fail():
        raise EngineError("closed")

    with pytest.raises(EngineError, match="closed"):
        answers([lambda: _request("a", cancelled), fail], lambda request: None, threads=1)
    assert cancelled == ["a"]
