# SPDX-License-Identifier: Apache-2.0
"""Random episodes of the whole engine: what is asked for, host limits and faults; and the smallest form of one.

An episode is plain data, so a failure prints as something that can be run again: `run_episode(world, Episode(...))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from property_world import CHUNK, World

from mmjax.sampling_params import SamplingParams

BATCH = 4
STOPS = 12  # of some requests: enough for an answer to end early now and then


@dataclass(frozen=True)
class Ask:
    """One request. Times are rounds of the engine's loop: `arrival` from the start, `cancel` from the arrival."""

    prompt: int
    max_tokens: int = 8
    arrival: int = 0
    cancel: int | None = None
    stop: tuple[int, ...] = ()
    min_tokens: int = 0
    penalty: float = 1.0
    temperature: float = 0.0
    logprobs: int | None = None
    ignore_eos: bool = True
    embed_only: bool = False
    bad: bool = False  # its pixels can't be packed

    @property
    def params(self) -> SamplingParams:
        """What the caller passes."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            repetition_penalty=self.penalty,
            frequency_penalty=self.penalty - 1,
            stop_token_ids=self.stop,
            logprobs=self.logprobs,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Limits:
    """Host limits of an episode's engine; None stands for the machine's own.

    Attributes:
      items, tokens, rows: budgets A and B, and rows of the pool (C and D).
      retain: whether rows stay for reuse.
      cap: encoder tokens of a step while sequences decode.
      ahead: requests whose items may be encoded before a chunk needs them.
    """

    chunk: int = CHUNK
    blocks: int | None = None
    batch: int = BATCH
    prefills: int = BATCH
    reuse: bool = True
    overlap: bool = True
    chunked: bool = True
    policy: str = "default"
    readiness: str = "chunk"
    items: int = BATCH
    tokens: int | None = None
    rows: int | None = None
    retain: bool = True
    cap: int | None = None
    ahead: int = 0


@dataclass(frozen=True)
class Faults:
    """Which calls fail, counted from 0: packing a batch (each item alone packs), the device, decoding an item again."""

    pack: tuple[int, ...] = ()
    device: tuple[int, ...] = ()
    restore: tuple[int, ...] = ()


@dataclass(frozen=True)
class Episode:
    """Requests to one engine.

    Attributes:
      forget: whether all caches are emptied whenever there is nothing to do.
      seed: of the times at which media threads are done.
    """

    page: int
    asks: tuple[Ask, ...]
    limits: Limits = Limits()
    faults: Faults = Faults()
    forget: bool = False
    seed: int = 0


# ---- drawing -------------------------------------------------------------------------------------------------------


def draw_episode(world: World, seed: int) -> Episode:
    """The episode of `seed`."""
    rng = np.random.default_rng(seed)
    page = int(rng.choice(list(world.machines)))
    narrow = bool(rng.random() < 0.2)
    asks = tuple(_draw_asks(world, rng, rows_alone=0.3 if narrow else 0.05))
    limits, faults = _draw_limits(world, rng, page, asks), _draw_faults(rng)
    if narrow:  # requests get into each other's way: one item a step, and room for little more than one request
        rows = limits.rows or _needed_rows(world, asks, limits.readiness)
        blocks = limits.blocks or _needed_tokens(world, asks) // page + 1
        limits = replace(limits, items=1, rows=rows, blocks=blocks, retain=True)
    if limits.readiness == "chunk" and limits.chunked and seed % 3 == 1:
        limits = _streamed(world, asks, limits)
    return Episode(page, asks, limits, faults, forget=bool(rng.random() < 0.2), seed=seed)


def _draw_asks(world: World, rng: np.random.Generator, rows_alone: float) -> Iterator[Ask]:
    favourites = rng.permutation(world.drawn)  # few prompts come often, so that caches are hit
    gap = rng.choice([0.0, 0.5, 3.0, 20.0], p=[0.3, 0.3, 0.3, 0.1])
    longest = rng.choice([4, 16, 48], p=[0.3, 0.5, 0.2])
    arrival = 0
    for _ in range(rng.integers(4, 25) if rng.random() < 0.95 else rng.integers(50, 100)):
        prompt = int(favourites[min(rng.geometric(0.12) - 1, len(favourites) - 1)])
        max_tokens = int(rng.integers(1, longest + 1))
        stop = tuple(rng.choice(world.model.cfg.vocab_size, STOPS, replace=False).tolist())
        stop = stop if rng.random() < 0.3 else ()
        yield Ask(
            prompt,
            max_tokens,
            arrival,
            cancel=int(rng.integers(0, 30)) if rng.random() < 0.12 else None,
            stop=stop,
            min_tokens=int(rng.integers(0, max_tokens)) if stop and rng.random() < 0.5 else 0,
            penalty=1.5 if rng.random() < 0.08 else 1.0,
            temperature=0.8 if rng.random() < 0.04 else 0.0,
            logprobs=int(rng.integers(0, 6)) if rng.random() < 0.05 else None,
            ignore_eos=bool(rng.random() < 0.5),
            embed_only=bool(world.prompts[prompt].items) and bool(rng.random() < rows_alone),
            bad=bool(rng.random() < 0.01),
        )
        arrival += int(rng.poisson(gap))


def _draw_limits(world: World, rng: np.random.Generator, page: int, asks: tuple[Ask, ...]) -> Limits:
    budgets = world.machines[page].budgets
    prompts = [world.prompts[ask.prompt] for ask in asks]
    items = [item for prompt in prompts for item in prompt.items]
    most_tokens = max((item.plan.encoder_tokens for item in items), default=1)
    readiness = "request" if rng.random() < 0.25 else "chunk"
    needed = _needed_rows(world, asks, readiness if rng.random() < 0.8 else "chunk")
    blocks = -(-_needed_tokens(world, asks) // page)
    chunked = bool(rng.random() < 0.93)
    return Limits(
        chunk=int(2 ** rng.uniform(0, np.log2(CHUNK))) if chunked else int(rng.integers(CHUNK // 2, CHUNK + 1)),
        blocks=None if rng.random() < 0.3 else int(blocks + rng.integers(0, blocks // 2 + 2)),
        batch=int(rng.integers(1, BATCH + 1)),
        prefills=int(rng.integers(1, BATCH + 1)),
        reuse=bool(rng.random() < 0.75),
        overlap=bool(rng.random() < 0.6),
        chunked=chunked,
        policy=str(rng.choice(["default", "eager", "disabled"])),
        readiness=readiness,
        items=int(rng.integers(1, BATCH + 1)),
        tokens=_draw_limit(rng, most_tokens, budgets.max_num_tokens),
        rows=_draw_limit(rng, needed, budgets.capacity_rows),
        retain=bool(rng.random() < 0.8),
        cap=None if rng.random() < 0.6 else int(rng.integers(1, most_tokens + 1)),
        ahead=int(rng.choice([0, 1, 8])),
    )


def _streamed(world: World, asks: tuple[Ask, ...], limits: Limits) -> Limits:
    """Enough for one temporal step of every clip, so that clips run in parts; many a picture is too large."""
    plans = [item.plan for ask in asks for item in world.prompts[ask.prompt].items if len(item.plan.contexts) > 1]
    if not plans:
        return limits
    tokens = max(plan.contexts[0] for plan in plans)
    return replace(limits, tokens=tokens, rows=max(plan.rows // len(plan.contexts) for plan in plans))


def _needed_tokens(world: World, asks: tuple[Ask, ...]) -> int:
    """The longest of all prompts with their answers."""
    return max(len(world.prompts[ask.prompt].token_ids) + ask.max_tokens for ask in asks)


def _needed_rows(world: World, asks: tuple[Ask, ...], readiness: str) -> int:
    """The least pool in which every request can run."""
    rows = [[item.plan.rows for item in world.prompts[ask.prompt].items] for ask in asks]
    return max(1, *(sum(own) if readiness == "request" else max(own, default=0) for own in rows))


def _draw_limit(rng: np.random.Generator, needed: int, most: int) -> int | None:
    """None, rarely too little, else just enough or up to twice as much."""
    if rng.random() < 0.3:
        return None
    if rng.random() < 0.05:
        return max(1, needed - 1)
    return int(min(most, needed + rng.integers(0, needed + 1)))


def _draw_faults(rng: np.random.Generator) -> Faults:
    def calls(chance: float, number: int, within: int) -> tuple[int, ...]:
        return tuple(sorted(set(rng.integers(0, within, number).tolist()))) if rng.random() < chance else ()

    device = calls(0.1, 2, 80)
    if rng.random() < 0.2:  # twice in a row is once too often
        device = tuple(sorted({*device, *(number + 1 for number in device)}))
    return Faults(pack=calls(0.15, 2, 10), device=device, restore=calls(0.1, 1, 4))


# ---- making it small -----------------------------------------------------------------------------------------------


def smallest(episode: Episode, fails: Callable[[Episode], bool]) -> Episode:
    """A part of `episode` that still fails: no request, limit or fault of it can be left out."""
    while True:
        for simpler in _simpler(episode):
            if fails(simpler):
                episode = simpler
                break
        else:
            return episode


def _simpler(episode: Episode) -> Iterator[Episode]:
    size = len(episode.asks) // 2
    while size:
        for start in range(0, len(episode.asks), size):
            kept = episode.asks[:start] + episode.asks[start + size :]
            if kept:
                yield replace(episode, asks=kept)
        size //= 2
    if episode.forget:
        yield replace(episode, forget=False)
    for name, default in (("faults", Faults()), ("limits", Limits())):
        for plain in _plainer(getattr(episode, name), default):
            yield replace(episode, **{name: plain})
    for i, ask in enumerate(episode.asks):
        for plain in _plainer(ask, Ask(ask.prompt, 1)):
            yield replace(episode, asks=(*episode.asks[:i], plain, *episode.asks[i + 1 :]))


def _plainer(part: Any, default: Any) -> Iterator[Any]:
    """`part` with one field as in `default`, or half way to it."""
    for entry in fields(part):
        value, plain = getattr(part, entry.name), getattr(default, entry.name)
        if value != plain:
            yield replace(part, **{entry.name: plain})
        if type(value) is int and type(plain) is int and abs(value - plain) > 1:
            yield replace(part, **{entry.name: (value + plain) // 2})
