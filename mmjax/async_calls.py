# SPDX-License-Identifier: Apache-2.0
"""Calls from coroutines: a thread submits the request, its parts are awaited, and whoever leaves early cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from mmjax.engine.handle import Handle
from mmjax.outputs import Delta, RequestOutput


async def parts_of(submit: Callable[[], Handle]) -> AsyncIterator[Delta | RequestOutput]:
    """Deltas and, last, the output of the request that `submit` queues. Raises the request's error."""
    submitting = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        handle = await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_cancel_submitted)
        raise
    loop, parts = asyncio.get_running_loop(), asyncio.Queue()
    handle.subscribe(lambda part: loop.call_soon_threadsafe(parts.put_nowait, part))
    try:
        part = None
        while not isinstance(part, RequestOutput):
            part = await parts.get()
            if isinstance(part, RequestOutput) and part.error is not None:
                raise part.error
            yield part
    finally:
        handle.cancel()


def _cancel_submitted(submitting: asyncio.Future[Handle]) -> None:
    """A request whose caller gave up while it was being submitted."""
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
