# SPDX-License-Identifier: Apache-2.0
"""The slow judge: requests one after another, everything computed anew for every token."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mmjax.engine.at_exit import close_at_exit
from mmjax.engine.request import Request
from mmjax.errors import EngineError, MMJaxError
from mmjax.inputs.items import ProcessedItem
from mmjax.inputs.prompt import CacheKey
from mmjax.models.family import Model
from mmjax.outputs import TokenLogprobs
from mmjax.reference.runner import ReferenceRunner


class ReferenceEngine:
    """Same interface as `mmjax.engine.service.Service`, without batches, chunks, pages and caches."""

    tokens_per_block = None

    def __init__(
        self,
        model: Model,
        params: dict,
        *,
        device: jax.Device,
        max_seq_len: int | None = None,
        banned_ids: Sequence[int] = (),
    ):
        self.runner = ReferenceRunner(
            model.family,
            model.cfg,
            params,
            model.processor,
            device=device,
            banned_ids=banned_ids,
        )
        self.max_seq_len = max_seq_len or model.cfg.max_position_embeddings
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._cancelled: set[str] = set()
        self._door = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="mmjax-reference", daemon=True)

    def start(self) -> ReferenceEngine:
        self._thread.start()
        close_at_exit(self)
        return self

    def has_rows(self, key: CacheKey | None) -> bool:
        """No: nothing is kept."""
        return False

    def check_prompt(self, num_tokens: int, *, embed_only: bool) -> None:
        """Nothing to refuse: there are no steps to fit into."""

    def submit(self, request: Request) -> None:
        with self._door:
            if self._closed:
                raise EngineError("the engine was closed")
            self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        self._cancelled.add(request_id)

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def invalidate(self) -> None:
        """Nothing to forget: nothing is kept."""

    def replace_weights(self, params: dict) -> None:
        raise EngineError("the reference keeps the weights that it was made with")

    def close(self) -> None:
        """Cancels what is left and ends the thread."""
        with self._door:
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    def release(self) -> None:
        """After `close`: lets go of the device's arrays."""
        self.runner.params = None

    def _loop(self) -> None:
        while (request := self._inbox.get()) is not None:
            try:
                self._run(request)
            except MMJaxError as error:
                request.handle.finish(request.output("error", error))
            except Exception as error:
                failure = EngineError(f"the reference failed: {error!r}")
                request.handle.finish(request.output("error", failure))
            self._cancelled.discard(request.id)

    def _run(self, request: Request) -> None:
        if self._gone(request):
            request.handle.finish(request.output("cancelled"))
            return
        request.note_started(0)
        rows = self.item_rows(request)
        if request.embed_only:
            request.rows = rows
            request.handle.finish(request.output("stop"))
            return
        reason = None
        while reason is None:
            if self._gone(request):
                reason = "cancelled"
                request.flush()
                break
            logits = self.runner.logits(request.prompt, rows, request.output_ids)[-1:]
            reason = request.accept(*self._choose(request, logits))
        request.handle.finish(request.output(reason))

    def _gone(self, request: Request) -> bool:
        return self._closed or request.id in self._cancelled

    def item_rows(self, request: Request) -> list[np.ndarray]:
        """Rows of every item, each encoded alone, or as the caller supplied them."""
        rows = []
        for item in request.prompt.items:
            if item.embedding is not None:
                rows.append(item.embedding)
            else:
                rows.append(self.runner.encode(ProcessedItem(item.plan, item.patches)))
                request.metrics.items_encoded += 1
        request.metrics.encode = request.elapsed()
        return rows

    def _choose(self, request: Request, logits: np.ndarray) -> tuple[int, TokenLogprobs | None]:
        sampled = self.runner.sample(logits, request.sampling_row, request.prompt.token_ids, request.output_ids)
        return int(sampled.tokens[0]), TokenLogprobs.read(sampled, 0, request.params.logprobs)
