# SPDX-License-Identifier: Apache-2.0
"""How other threads reach the engine's: messages that it runs between two steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any


class Mailbox:
    """Messages are functions that its owner calls. Once it is shut nothing gets in, so that nobody waits in vain."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._door = threading.RLock()  # the collector may close a forgotten stream, which posts, within a post
        self._shut = False

    def post(self, message: Callable[[], None]) -> bool:
        """Leaves a message, from any thread; False if nobody reads any more."""
        with self._door:
            if not self._shut:
                self._messages.put(message)
            return not self._shut

    def ask(self, function: Callable[[], Any]) -> Future | None:
        """Leaves a question, from any thread: a future of what `function` returns or raises; None if nobody reads."""
        future: Future = Future()
        return future if self.post(partial(_settle, future, function)) else None

    def deliver(self, *, wait: bool) -> None:
        """Runs all messages that are there, waiting for a first one if asked to."""
        if wait:
            self._messages.get()()
        while not self._messages.empty():
            self._messages.get()()

    def empty(self) -> bool:
        return self._messages.empty()

    def shut(self) -> None:
        """Lets no more messages in; those that are there can still be delivered."""
        with self._door:
            self._shut = True


def _settle(future: Future, function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
