# SPDX-License-Identifier: Apache-2.0
"""Items whose pixels are needed once more are decoded again, in the media threads, while their request waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from mmjax.engine.request import Request, Status
from mmjax.errors import MMJaxError, RequestError
from mmjax.inputs.prompt import PromptItem


class PixelRestorer:
    """Belongs to the engine's thread, which alone calls its public methods.

    Args:
      media: threads that decode.
      restore: makes the patches of an item, or of some parts of one, anew from its source.
      post: leaves a message for the engine's thread, from any other.
      there: told (request id, item) of pixels that can be used again.
      failed: told (request, error) of a request that can't go on.
    """

    def __init__(
        self,
        media: Executor,
        restore: Callable[[list[PromptItem]], Sequence[Any]],
        *,
        post: Callable[[Callable[[], None]], object],
        there: Callable[[str, int], None],
        failed: Callable[[Request, MMJaxError], None],
    ):
        self.restore = restore
        self._media, self._post, self._there, self._failed = media, post, there, failed
        self._waiting: set[str] = set()

    def send(self, requests: Iterable[Request]) -> bool:
        """Starts on `request.lacking` of each request that does not wait yet; True while any request waits."""
        for request in requests:
            if not request.restoring:
                request.restoring = True
                self._waiting.add(request.id)
                self._media.submit(self._decode, request, list(request.lacking))
        return bool(self._waiting)

    def forget(self, request: Request) -> None:
        """Nobody waits for this request any more: it ended."""
        self._waiting.discard(request.id)

    def _decode(self, request: Request, indices: list[int]) -> None:
        """In a media thread."""
        patches = {}
        items = [request.prompt.items[index] for index in sorted(indices)]
        for number, group in groupby(items, key=attrgetter("number")):
            parts = list(group)
            try:
                patches |= zip((part.index for part in parts), self.restore(parts), strict=True)
            except Exception as error:
                known = isinstance(error, MMJaxError)
                failure = error if known else RequestError(f"can't be decoded again: {error!r}", item=number)
                self._post(partial(self._failed, request, failure))
                return
        self._post(partial(self._restored, request, patches))

    def _restored(self, request: Request, patches: dict[int, Any]) -> None:
        request.restoring, request.lacking = False, []
        self._waiting.discard(request.id)
        if request.status is Status.FINISHED:
            return
        for index, pixels in patches.items():
            request.prompt.items[index].patches = pixels
            self._there(request.id, index)
