# SPDX-License-Identifier: Apache-2.0
"""Closing at exit what nobody closed: the interpreter aborts if it ends while a thread is in the middle of a step."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Closable(Protocol):
    """Something with a thread that `close` ends; closing twice is harmless."""

    def close(self) -> None: ...


_running: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(engine: Closable) -> None:
    """Closes `engine` when the interpreter ends, if it still exists then."""
    _running.add(engine)


@atexit.register
def _close_all() -> None:
    for engine in list(_running):
        engine.close()
