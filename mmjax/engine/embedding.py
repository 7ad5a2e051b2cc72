# SPDX-License-Identifier: Apache-2.0
"""Requests that want embedding rows instead of an answer, and items whose rows the caller supplied."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmjax.encoder.scheduler import MultimodalItemScheduler
from mmjax.encoder.state import EncoderItem
from mmjax.engine.request import Request
from mmjax.inputs.prompt import PromptItem


def encoder_item(item: PromptItem) -> EncoderItem:
    """The item as the second plane sees it; rows that the caller supplied cost no encoder work."""
    if item.embedding is None:
        made = EncoderItem.from_plan(item.plan, item.row_positions, item.cache_key)
    else:
        made = EncoderItem.supplied(item.row_positions, item.cache_key)
    return made._replace(number=item.number)


class RowReader:
    """Copies rows to the host as they come and lets go of them."""

    def __init__(self, items: MultimodalItemScheduler, encoder: Any):
        self._items, self._encoder = items, encoder

    def read(self, request: Request, end: int) -> None:
        """Takes the rows of the items that lie in prompt positions [computed, end) into the request; waits for them."""
        rows = [
            np.array(self._encoder.read(self._items.row_slots(request.id, item.index)))
            for item in request.prompt.items
            if request.computed <= item.row_positions[0] and item.row_positions[-1] < end
        ]
        request.rows += rows  # all or none: after a device error they are read once more
        request.computed = end
        self._items.advance(request.id, end)
