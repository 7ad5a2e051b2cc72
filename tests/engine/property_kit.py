# SPDX-License-Identifier: Apache-2.0
"""Runs an episode of the whole engine. Its loop is driven without its thread, so that it always goes the same way.

Between the engine and the runners stands what injects faults and watches what is encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from property_episodes import Episode, Faults, Limits
from property_world import MULTIMODAL, World

from mmjax.encoder.budgets import EncoderBudgets, Readiness
from mmjax.engine.detokenizer import Detokenizer
from mmjax.engine.handle import Handle
from mmjax.engine.request import Request
from mmjax.engine.service import Service
from mmjax.engine.stop import StopChecker
from mmjax.engine.trace import StepTrace
from mmjax.errors import DeviceError
from mmjax.inputs.items import ProcessedItem
from mmjax.inputs.process import patches_again
from mmjax.inputs.prompt import PromptItem

ROUNDS = 12  # at most so many for each token or item; far more than any episode needs, yet an end


class EpisodeError(Exception):
    """An episode that did not go as it must."""


class Injector:
    """Lets calls fail, and notes whose they were.

    A device error takes the donated arrays with it, before or after the work was dispatched.

    Attributes:
      owners: by id of a pixel array, the array and the (request, item) it was brought for.
      bad: requests whose pixels can't be packed.
      blamed: requests that must fail.
      encoded: cache key of each item encoded; (request, item) of those without.
      batches: (items, tokens) of each encoder call.
    """

    def __init__(self, machine: Any, faults: Faults):
        self.machine, self.faults = machine, faults
        self.calls = {part.name: 0 for part in fields(Faults)}
        self.injected = self.recoveries = 0
        self.owners: dict[int, tuple[np.ndarray, str, PromptItem]] = {}
        self.bad: set[str] = set()
        self.blamed: set[str] = set()
        self.encoded: list[tuple] = []
        self.batches: list[tuple[int, int]] = []
        self._alone = 0  # items still to be tried alone

    def own(self, patches: np.ndarray | None, request_id: str, item: PromptItem) -> None:
        if patches is not None:
            self.owners[id(patches)] = (patches, request_id, item)

    def due(self, kind: str) -> bool:
        """Whether this call of its kind is to fail."""
        found = self.calls[kind] in getattr(self.faults, kind)
        self.calls[kind] += 1
        self.injected += found
        return found

    def on_device(self, work: Callable[[], Any]) -> Any:
        if not self.due("device"):
            return work()
        if self.calls["device"] % 2:
            work()
        self.machine.text.state = self.machine.encoder.pool = None
        raise DeviceError("injected")

    def pack(self, items: list[ProcessedItem]) -> list[tuple[str, PromptItem]]:
        """The items' owners. Fails for bad items, and for batches that are due; the engine then tries items alone."""
        owners = [self.owners[id(item.patches)][1:] for item in items]
        requests = {request_id for request_id, _ in owners}
        wrong = requests & self.bad
        if self._alone:
            self._alone -= 1
        elif self.due("pack") or wrong:
            self._alone = len(items)
            wrong = wrong or requests  # all of them pack alone, so that none can be told from the others
        if wrong:
            self.blamed |= wrong
            raise RuntimeError("injected")
        return owners

    def encode(self, owners: list[tuple[str, PromptItem]], work: Callable[[], None]) -> None:
        self.encoded += [item.cache_key or (request_id, item.index) for request_id, item in owners]
        self.batches.append((len(owners), sum(item.plan.encoder_tokens for _, item in owners)))
        self.on_device(work)


class _Text:
    """A ModelRunner whose calls may fail."""

    def __init__(self, injector: Injector, poison: Callable[[], None]):
        self._runner, self._injector, self._poison = injector.machine.text, injector, poison

    def allocate(self) -> None:
        """The last of what is made again after a device error."""
        self._injector.recoveries += 1
        self._runner.allocate()
        self._poison()

    def begin(self, request: Request) -> None:
        self._injector.on_device(lambda: self._runner.begin(request))

    def prefill(self, chunks: list, row_slots: Callable) -> Any:
        return self._readable(self._injector.on_device(lambda: self._runner.prefill(chunks, row_slots)))

    def decode(self, requests: list[Request]) -> Any:
        return self._readable(self._injector.on_device(lambda: self._runner.decode(requests)))

    def _readable(self, result: Any) -> Any:
        def read() -> Any:
            return self._injector.on_device(result.read)

        return SimpleNamespace(rows=result.rows, requests=result.requests, read=read)


class _Encoder:
    """An EncoderRunner whose calls may fail."""

    def __init__(self, injector: Injector):
        self._runner, self._injector = injector.machine.encoder, injector
        self.buckets, self.processor = self._runner.buckets, self._runner.processor

    def allocate(self) -> None:
        self._runner.allocate()

    def pack(self, items: list, bucket: Any) -> Any:
        return self._injector.pack(items), self._runner.pack(items, bucket)

    def encode(self, packed: Any, slots: list, bucket: Any) -> None:
        owners, inputs = packed
        self._injector.encode(owners, lambda: self._runner.encode(inputs, slots, bucket))

    def write(self, *arguments: Any) -> None:
        self._injector.on_device(lambda: self._runner.write(*arguments))

    def read(self, slots: np.ndarray) -> np.ndarray:
        return self._injector.on_device(lambda: self._runner.read(slots))


class _Media:
    """Media threads that are done when the driver says so."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def submit(self, function: Callable, *arguments: Any) -> None:
        self.tasks.append(lambda: function(*arguments))

    def run(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task()


class _Textless:
    """A tokenizer without text; what answers read like is not the matter here."""

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        return ""


@dataclass
class Run:
    """An episode under way: its service, its requests by number of the ask, and what stands between."""

    world: World
    episode: Episode
    service: Service
    injector: Injector
    media: _Media
    requests: dict[int, Request] = field(default_factory=dict)
    round: int = 0

    @classmethod
    def of(cls, world: World, episode: Episode) -> Run:
        machine, limits = world.machines[episode.page], episode.limits
        injector, media = Injector(machine, episode.faults), _Media()
        config = replace(
            machine.config,
            chunk_tokens=limits.chunk,
            block_limit=limits.blocks,
            max_batch_size=limits.batch,
            max_prefill_sequences=limits.prefills,
            enable_block_reuse=limits.reuse,
            enable_chunked_prefill=limits.chunked,
            disable_overlap_scheduler=not limits.overlap,
        )
        multimodal = replace(
            MULTIMODAL,
            encoder_scheduling_policy=limits.policy,
            encoder_tokens_while_decoding=limits.cap,
            encoder_side_stream_max_ahead=limits.ahead,
        )
        service = Service(
            _Text(injector, partial(world.poison, episode.page)),
            _Encoder(injector),
            config,
            multimodal,
            host_budgets(machine.budgets, limits),
            machine.text.layout.num_blocks,
            media,
            machine=machine,
            trace=StepTrace(1),
        )
        run = cls(world, episode, service, injector, media)
        service.engine.pixels.restore = run._restore
        return run

    def go(self) -> None:
        """Drives the engine until nothing is left to do. Raises EpisodeError if a step breaks the books."""
        asks, engine = self.episode.asks, self.service.engine
        rng = np.random.default_rng(self.episode.seed)
        coming = [number for number in range(len(asks)) if self._accepted(number)]
        prompts = [self.world.prompts[ask.prompt] for ask in asks]
        work = sum(len(p.token_ids) + len(p.items) + a.max_tokens for p, a in zip(prompts, asks, strict=True))
        limit = ROUNDS * work + max((ask.arrival for ask in asks), default=0)
        arrived: dict[int, int] = {}
        while True:
            for number in [n for n in coming if asks[n].arrival <= self.round]:
                coming.remove(number)
                arrived[number] = self.round
                self._submit(number)
            for number, since in arrived.items():
                if asks[number].cancel == self.round - since:
                    self.service.cancel(f"r{number}")
            if rng.random() < 0.5:
                self.media.run()
            batches = len(self.injector.batches)
            idle = engine._turn(False)
            self._check_books(self.injector.batches[batches:])
            self.round += 1
            if self.round > limit:
                raise EpisodeError(f"no end after {self.round} rounds")
            if idle and self.media.tasks:
                self.media.run()
            elif idle and engine._inbox.empty():
                if self.episode.forget:
                    self.service.invalidate()
                if not coming:
                    return
                self.round = max(self.round, min(asks[n].arrival for n in coming))

    def _submit(self, number: int) -> None:
        """As `LLM` does it."""
        ask, model, service = self.episode.asks[number], self.world.model, self.service
        prompt, params = service.in_parts(self.world.bring(ask.prompt)), ask.params
        room = max(1, service.max_seq_len - len(prompt.token_ids))
        page = service.tokens_per_block if prompt.reusable and not ask.embed_only else None
        request = Request(
            id=f"r{number}",
            prompt=prompt,
            params=params,
            handle=Handle(f"r{number}", service.cancel),
            checker=StopChecker(params, Detokenizer(_Textless()), model.eos_token_ids, room),
            max_tokens=min(room, ask.max_tokens),
            seed=number,
            eos_token_ids=model.eos_token_ids,
            key_tokens=prompt.key_tokens() if page else [],
            block_keys=prompt.block_keys(page) if page else [],
            embed_only=ask.embed_only,
        )
        self.requests[number] = request
        if ask.bad:
            self.injector.bad.add(request.id)
        for item in prompt.items:
            self.injector.own(item.patches, request.id, item)
        service.submit(request)

    def _accepted(self, number: int) -> bool:
        """Whether `LLM` would take the request: prompts that exceed a limit of the first plane are refused there."""
        ask, limits = self.episode.asks[number], self.episode.limits
        length = len(self.world.prompts[ask.prompt].token_ids)
        return ask.embed_only or (length < self.service.max_seq_len and (limits.chunked or length <= limits.chunk))

    def _restore(self, items: list[PromptItem]) -> list[np.ndarray]:
        if self.injector.due("restore"):
            raise OSError("injected")
        restored = patches_again(items, self.world.model.processor)
        request = next(r for r in self.requests.values() if any(own is items[0] for own in r.prompt.items))
        for item, patches in zip(items, restored, strict=True):
            self.injector.own(patches, request.id, item)
        return restored

    def _check_books(self, batches: list[tuple[int, int]]) -> None:
        """What must be so between any two steps: pages, slots and rows have their owners, limits are kept."""
        scheduler, pages, cache = self.service.scheduler, self.service.pages, self.service.items.cache
        limits, budgets, config = self.episode.limits, self.service.budgets, self.service.config
        references = [0] * pages.num_blocks
        for request in scheduler.running:
            for block in request.table:
                references[block] += 1
            _check(pages.blocks_for(request.computed) <= len(request.table), "positions without pages")
            _check(request.scheduled_outputs <= request.max_tokens, "more tokens under way than wanted")
        _check(references == pages._references, "page references are not those of the running requests")
        _check(len(scheduler.running) + len(scheduler._free_slots) == config.max_batch_size, "a slot is lost")
        _check(cache.claimed_rows <= cache.capacity_rows, "more rows claimed than there are")
        for row in self.service.engine.trace.rows:
            prefilled = sum(end - begin for _, begin, end in row.chunks)
            _check(not prefilled or prefilled + row.decodes <= limits.chunk, f"a step of {prefilled} prompt tokens")
            if row.decodes and limits.cap and limits.policy != "disabled":
                _check(len(row.items) <= 1 or row.encoder_tokens <= limits.cap, "too much encoded beside decoding")
        _check(limits.policy == "disabled" or len(batches) <= 1, f"{len(batches)} encoder calls in a step")
        for items, tokens in batches:
            within = items <= budgets.batch_size and tokens <= budgets.max_num_tokens
            _check(within, f"a batch of {items} items, {tokens} tokens")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise EpisodeError(otherwise)


def host_budgets(budgets: EncoderBudgets, limits: Limits) -> EncoderBudgets:
    """The machine's budgets with an episode's limits."""
    tokens, rows = limits.tokens or budgets.max_num_tokens, limits.rows or budgets.capacity_rows
    return replace(
        budgets,
        readiness=Readiness(limits.readiness),
        batch_size=limits.items,
        max_num_tokens=tokens,
        output_bytes=rows * budgets.row_bytes,
        reuse_bytes=rows * budgets.row_bytes if limits.retain else 0,
        capacity_rows=rows,
    )
