# SPDX-License-Identifier: Apache-2.0
"""A running engine as `LLM` sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from mmjax.config import EngineConfig, MultimodalConfig
from mmjax.encoder.buckets import BucketLadder, EncoderLoad
from mmjax.encoder.budgets import EncoderBudgets, Readiness
from mmjax.encoder.cache import EntryState
from mmjax.encoder.scheduler import EncoderSchedulingPolicy, MultimodalItemScheduler
from mmjax.engine.at_exit import close_at_exit
from mmjax.engine.engine import Engine
from mmjax.engine.pages import PageAllocator
from mmjax.engine.request import Request
from mmjax.engine.scheduler import Scheduler
from mmjax.engine.trace import StepTrace
from mmjax.errors import EngineError, PromptTooLongError
from mmjax.inputs.items import ItemPlan
from mmjax.inputs.parts import in_parts
from mmjax.inputs.process import patches_again
from mmjax.inputs.prompt import CacheKey, PreparedPrompt


class Service:
    """An engine over a pair of runners. Several may follow each other over the same runners, with other host limits.

    Args:
      text: runner of the language model, None for an engine that only encodes.
      encoder: runner of the tower.
      config: resolved; `block_limit` and `chunk_tokens` are the limits of this engine.
      num_blocks: KV pages of the device.
      machine: what the runners came from, for statistics.
    """

    def __init__(
        self,
        text: Any,
        encoder: Any,
        config: EngineConfig,
        multimodal: MultimodalConfig,
        budgets: EncoderBudgets,
        num_blocks: int,
        media: Executor,
        *,
        machine: Any = None,
        trace: StepTrace | None = None,
    ):
        self.machine = machine
        self.config, self.multimodal, self.budgets = config, multimodal, budgets
        blocks = min(num_blocks, config.block_limit or num_blocks)
        self.pages = PageAllocator(blocks, config.tokens_per_block)
        policy = EncoderSchedulingPolicy(multimodal.encoder_scheduling_policy)
        self._ladder = BucketLadder(encoder.buckets)
        # Parts of a clip come one after the other: with rows of all items at once, or in one step, nothing is gained.
        self._streams = budgets.readiness is not Readiness.REQUEST and config.enable_chunked_prefill
        self.items = MultimodalItemScheduler(budgets, self._ladder, policy)
        self.scheduler = Scheduler(
            config,
            self.pages,
            self.items,
            encoder_cap_while_decoding=multimodal.encoder_tokens_while_decoding,
            max_ahead=multimodal.encoder_side_stream_max_ahead,
        )
        self.engine = Engine(
            self.scheduler,
            text,
            encoder,
            media,
            partial(patches_again, processor=encoder.processor),
            overlap=not config.disable_overlap_scheduler,
            trace=trace,
        )
        self.max_seq_len = min(config.max_seq_len, blocks * config.tokens_per_block)

    @property
    def tokens_per_block(self) -> int | None:
        """Size of the pages that prompts may share; None if they share none."""
        return self.config.tokens_per_block if self.config.enable_block_reuse else None

    def check_prompt(self, num_tokens: int, *, embed_only: bool) -> None:
        """Refuses a prompt that no step could hold."""
        if not embed_only and not self.config.enable_chunked_prefill and num_tokens > self.config.chunk_tokens:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, a step holds {self.config.chunk_tokens}; "
                "allow enable_chunked_prefill or raise max_num_tokens"
            )

    def start(self) -> Service:
        self.engine.start()
        close_at_exit(self.engine)
        return self

    def submit(self, request: Request) -> None:
        request.prompt = self.in_parts(request.prompt)
        self.engine.submit(request)

    def in_parts(self, prompt: PreparedPrompt) -> PreparedPrompt:
        """The prompt as this engine takes it: clips that no encoder call or the row pool could hold are cut."""
        return in_parts(prompt, self._fits) if self._streams else prompt

    def _fits(self, plan: ItemPlan) -> bool:
        """Whether one encoder call and the row pool could hold the item."""
        load = EncoderLoad(1, plan.encoder_tokens, len(plan.contexts), plan.windows, plan.rows)
        within = load.tokens <= self.budgets.max_num_tokens and load.rows <= self.budgets.capacity_rows
        return within and self._ladder.fit(load) is not None

    def has_rows(self, key: CacheKey | None) -> bool:
        """Whether the rows of an item are there at this moment; any thread may ask."""
        return self.items.cache.state(key) is EntryState.READY

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    def call(self, function: Callable[[], Any]) -> Any:
        return self.engine.call(function)

    def replace_weights(self, params: dict) -> None:
        """Other weights of the same shapes for the machine; see `invalidate`."""
        self.invalidate(partial(self.machine.replace_weights, params))

    def invalidate(self, change: Callable[[], None] | None = None) -> None:
        """Forgets all rows and pages, after `change` has put new weights in the place of those that made them.

        Raises EngineError, and does nothing, while there are requests: no answer mixes two sets of weights.
        """

        def forget() -> None:
            scheduler = self.scheduler
            requests = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.embedding)
            if requests:
                raise EngineError(f"{requests} requests are under way; new weights have to wait for their end")
            if change is not None:
                change()
            self.items.invalidate()
            self.pages.clear()

        self.call(forget)

    def close(self) -> None:
        """Cancels what is running. Another service may follow over the same machine."""
        self.engine.close()

    def release(self) -> None:
        """After `close`: lets go of the device's arrays."""
        if self.machine is not None:
            self.machine.release()
