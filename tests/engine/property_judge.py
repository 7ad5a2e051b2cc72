# SPDX-License-Identifier: Apache-2.0
"""Judges an episode of the whole engine: every answer against the reference, every end, everything given back."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import tolerances
from property_episodes import Ask, Episode
from property_kit import EpisodeError, Run
from property_world import World

from mmjax.encoder.step import MultimodalEncoderContractError
from mmjax.engine.request import Request
from mmjax.errors import DeviceError, RequestError
from mmjax.inputs.parts import join_rows
from mmjax.outputs import RequestOutput


@dataclass
class Tally:
    """What happened, over all episodes."""

    episodes: int = 0
    requests: int = 0
    tokens: int = 0
    ties: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    faults: int = 0
    recoveries: int = 0
    preemptions: int = 0
    encodes: int = 0
    re_encodes: int = 0
    restores: int = 0
    reused_tokens: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, part.name)} {part.name.replace('_', '-')}" for part in fields(self))


def run_episode(world: World, episode: Episode, tally: Tally | None = None) -> Run:
    """Runs and judges an episode. Raises EpisodeError, or whatever the engine raised."""
    tally = Tally() if tally is None else tally
    counter = world.machines[episode.page].counter
    world.poison(episode.page)
    compiles = counter.count
    run = Run.of(world, episode)
    run.go()
    if counter.count != compiles:
        raise EpisodeError(f"compiled in service: {counter.names[compiles:]}")
    _check_drained(run)
    for number in run.requests:
        _check_request(run, number, tally)
    _check_encodes(run)
    _count(run, tally)
    return run


def _check_drained(run: Run) -> None:
    service = run.service
    rows, items, scheduler = service.items.cache.stats(), service.items, service.scheduler
    held = {
        "pages": service.pages.stats().in_use,
        "row bytes": rows.in_use_bytes + rows.reserved_bytes,
        "references": len(items._bound) + len(items._ahead),
        "item states": len(items._states),
        "requests": len(service.engine._requests) + len(service.engine._pending),
        "queued": len(scheduler.waiting) + len(scheduler.running) + len(scheduler.embedding),
        "slots": service.config.max_batch_size - len(scheduler._free_slots),
        "unfinished": sum(not request.handle.done for request in run.requests.values()),
    }
    if any(held.values()):
        raise EpisodeError(f"after the last request: {held}")
    if run.episode.forget and (rows.current_bytes or service.pages.stats().cached):
        raise EpisodeError("something is remembered although caches were emptied")


def _check_encodes(run: Run) -> None:
    """With room for everything and nothing lost, each picture is encoded once, whoever brings it."""
    limits, injector = run.episode.limits, run.injector
    roomy = limits.rows is None and limits.retain and limits.blocks is None and not run.episode.forget
    again = {key for key in injector.encoded if injector.encoded.count(key) > 1}
    if roomy and again and not (injector.injected or injector.bad):
        raise EpisodeError(f"encoded more than once: {again}")


# ---- one request ---------------------------------------------------------------------------------------------------


def _check_request(run: Run, number: int, tally: Tally) -> None:
    ask, request = run.episode.asks[number], run.requests[number]
    output = request.handle.wait(0)
    try:
        _check_end(run, ask, output, tally)
        _check_tokens(run, ask, request, output, tally)
        _check_logprobs(run.world, ask, output)
        _check_rows(run.world, ask, request, output)
        _check_usage(run, ask, output)
    except EpisodeError as error:
        raise EpisodeError(f"request {number} ({output.finish_reason}, {output.error}): {error}") from None


def _check_end(run: Run, ask: Ask, output: RequestOutput, tally: Tally) -> None:
    """Only those to blame fail, only those cancelled are cancelled, and answers end where they should."""
    error, blamed = output.error, output.request_id in run.injector.blamed
    stops = {*ask.stop, *(() if ask.ignore_eos else run.world.model.eos_token_ids)}
    early = [token for token in output.token_ids[ask.min_tokens : -1] if token in stops]
    if early or len(output.token_ids) > ask.max_tokens:
        raise EpisodeError(f"goes on after its end: {len(output.token_ids)} tokens, stops {early}")
    if _never_fits(run, ask):
        tally.refused += 1
        if not isinstance(error, RequestError) or output.token_ids:
            raise EpisodeError("ought to be refused")
    elif output.finish_reason == "error":
        tally.failed += 1
        expected = (
            (blamed and isinstance(error, MultimodalEncoderContractError))
            or (isinstance(error, RequestError) and "decoded again" in error.message and run.episode.faults.restore)
            or (isinstance(error, DeviceError) and run.injector.recoveries > 1)
        )
        if not expected or (isinstance(error, RequestError) and error.request_id != output.request_id):
            raise EpisodeError("failed without a fault of its own")
    elif blamed:
        raise EpisodeError("its item was not packed, yet it did not fail")
    elif output.finish_reason == "cancelled":
        tally.cancelled += 1
        if ask.cancel is None:
            raise EpisodeError("nobody cancelled it")
    elif not ask.embed_only:
        room = run.service.max_seq_len - len(output.prompt_token_ids)
        stopped = output.token_ids[-1] in stops and len(output.token_ids) > ask.min_tokens
        full = len(output.token_ids) == min(ask.max_tokens, room)
        if (output.finish_reason == "stop") != stopped or not (stopped or full):
            raise EpisodeError(f"ends with {len(output.token_ids)} tokens")


def _never_fits(run: Run, ask: Ask) -> bool:
    budgets, items = run.service.budgets, run.service.in_parts(run.world.prompts[ask.prompt]).items
    rows = [item.plan.rows for item in items]
    tokens = [item.plan.encoder_tokens for item in items if item.embedding is None]
    at_once = sum(rows) if run.episode.limits.readiness == "request" else max(rows, default=0)
    return at_once > budgets.capacity_rows or max(tokens, default=0) > budgets.max_num_tokens


def _check_tokens(run: Run, ask: Ask, request: Request, output: RequestOutput, tally: Tally) -> None:
    eos = run.world.model.eos_token_ids
    wrong, ties = run.world.faults(ask.prompt, output.token_ids, ask.params, request.seed, eos)
    tally.tokens += len(output.token_ids)
    tally.ties += ties
    if wrong:
        logits, token = run.world.logits(ask.prompt, output.token_ids)[wrong[0]], output.token_ids[wrong[0]]
        raise EpisodeError(
            f"tokens {wrong} of {len(output.token_ids)} are not the reference's: "
            f"first {token} ({logits[token]:.5f}), the model's best {logits.argmax()} ({logits.max():.5f})"
        )


def _check_logprobs(world: World, ask: Ask, output: RequestOutput) -> None:
    if ask.logprobs is None or not output.token_ids:
        return
    if len(output.logprobs) != len(output.token_ids):
        raise EpisodeError(f"{len(output.logprobs)} log-probabilities for {len(output.token_ids)} tokens")
    logits = world.logits(ask.prompt, output.token_ids).astype(np.float64)
    wanted = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    for step, (entry, token) in enumerate(zip(output.logprobs, output.token_ids, strict=True)):
        near = abs(entry.logprob - wanted[step, token]) <= tolerances.LOGITS
        tops = np.sort(wanted[step])[::-1][: ask.logprobs]
        found = np.sort([wanted[step, other] for other in entry.top])[::-1]
        if entry.token_id != token or not near or not np.allclose(found, tops, rtol=0, atol=tolerances.LOGITS):
            raise EpisodeError(f"log-probabilities of token {step}: {entry}")


def _check_rows(world: World, ask: Ask, request: Request, output: RequestOutput) -> None:
    """Rows that were asked for, or as many as came before the request's end."""
    wanted = world.rows(ask.prompt)
    if request.rows:
        got = np.concatenate(request.rows)  # by item, or by part of one
        want = np.concatenate(wanted)[: len(got)]
        if got.shape != want.shape or not np.allclose(got, want, rtol=0, atol=tolerances.OTHER_LAYOUT):
            raise EpisodeError("rows that are not the reference's")
    if ask.embed_only and output.finish_reason == "stop":
        found = [len(rows) for rows in join_rows(request.prompt, request.rows)]
        if found != [len(rows) for rows in wanted]:
            raise EpisodeError(f"rows of items number {found}")


def _check_usage(run: Run, ask: Ask, output: RequestOutput) -> None:
    usage, page = output.usage, run.episode.page
    reusable = run.episode.limits.reuse and run.world.prompts[ask.prompt].reusable
    if usage.completion_tokens != len(output.token_ids) or usage.cached_tokens % page:
        raise EpisodeError(f"{usage}")
    if usage.cached_tokens and (not reusable or usage.cached_tokens >= len(output.prompt_token_ids)):
        raise EpisodeError(f"{usage.cached_tokens} tokens from the prefix cache")


def _count(run: Run, tally: Tally) -> None:
    injector, service = run.injector, run.service
    tally.episodes += 1
    tally.requests += len(run.requests)
    tally.faults += injector.injected + len(injector.bad)
    tally.recoveries += injector.recoveries
    tally.preemptions += service.scheduler.preemptions
    tally.encodes += len(injector.encoded)
    tally.re_encodes += len(injector.encoded) - len(set(injector.encoded))
    tally.restores += injector.calls["restore"]
    tally.reused_tokens += service.pages.stats().reused_tokens
    tally.steps += service.engine.trace.steps
