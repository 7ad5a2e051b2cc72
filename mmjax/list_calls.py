# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for answers, of one request or a list: options shared out, errors kept apart, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mmjax.engine.handle import Handle
from mmjax.engine.request import Request
from mmjax.errors import RequestError
from mmjax.outputs import RequestOutput
from mmjax.sampling_params import SamplingParams


def answer(handle: Handle) -> RequestOutput:
    """The output of a request, or its error raised. An interrupted wait cancels the request."""
    try:
        return handle.result()
    except BaseException:
        handle.cancel()
        raise


def answers(
    makers: Sequence[Callable[[], Request]], submit: Callable[[Request], None], *, threads: int
) -> list[RequestOutput]:
    """Makes several requests at a time, submits them in order, then waits for all; outputs in order.

    Errors that are a request's own stay in its output. Any other error, or an interrupt, cancels the rest.
    """
    if not makers:
        return []
    handles: list[Handle] = []
    pool = ThreadPoolExecutor(min(threads, len(makers)), thread_name_prefix="mmjax-prepare")
    try:
        for made in pool.map(_made, makers):
            if isinstance(made, RequestError):
                handles.append(_failed(made))
            else:
                submit(made)
                handles.append(made.handle)
        return [_output(handle) for handle in handles]
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def share_out(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Options of each of `count` requests: a list gives one to each, anything else goes to all."""
    for name, value in options.items():
        if isinstance(value, list) and len(value) != count:
            raise RequestError(f"{name} has {len(value)} entries for {count} requests")
    return [
        {name: value[index] if isinstance(value, list) else value for name, value in options.items()}
        for index in range(count)
    ]


def params_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """Sampling parameters of each of `count` requests: one for all, or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"params must be SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} requests")
    return list(params)


def _made(make: Callable[[], Request]) -> Request | RequestError:
    try:
        return make()
    except RequestError as error:
        return error


def _failed(error: RequestError) -> Handle:
    """The handle of a request that can't be submitted: it has failed already."""
    handle = Handle(error.request_id or "", lambda _: None)
    output = RequestOutput(
        request_id=handle.request_id,
        text="",
        token_ids=[],
        prompt_token_ids=[],
        finish_reason="error",
        error=error,
    )
    handle.finish(output)
    return handle


def _output(handle: Handle) -> RequestOutput:
    output = handle.wait()
    if output.error is not None and not isinstance(output.error, RequestError):
        raise output.error
    return output
