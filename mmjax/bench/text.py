# SPDX-License-Identifier: Apache-2.0
"""The language model's steps through `ModelRunner`: packed prefill, and decode at full batch."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.bench.floors import Ceilings, decode_work, prefill_work
from mmjax.bench.report import Figure
from mmjax.bench.requests import make_request, place
from mmjax.bench.subject import Subject, text_ids
from mmjax.bench.timing import measure
from mmjax.config import EngineConfig, decode_ladder, resolve_engine, smallest_fit
from mmjax.engine.batch import Chunk
from mmjax.engine.request import Request
from mmjax.engine.runner import ModelRunner

STEPS = 16  # decode steps in flight before anybody waits, as in an engine that never reads a token back

_PAGE = 64


def bench_prefill(subject: Subject, sequences: int, length: int, repeat: int) -> list[Figure]:
    """One step that packs `sequences` prompts of `length` tokens."""
    ceilings, tokens, rng = subject.ceilings(repeat), sequences * length, np.random.default_rng(0)
    config = EngineConfig(
        max_batch_size=sequences, max_num_tokens=tokens, max_seq_len=length + 1, max_prefill_sequences=sequences
    )
    steps = {f"prefill {tokens}", f"prefill {tokens} without prefix", f"sample {sequences} greedy"}
    runner = _runner(subject, config, sequences * _pages(length + 1), steps)
    sets = []
    for _ in range(2):
        requests = [
            make_request(subject.model, f"r{i}", text_ids(subject.model, length, rng)) for i in range(sequences)
        ]
        place(requests, _pages(length + 1), rng)
        sets.append([Chunk(request, 0, length) for request in requests])

    def prefill(index: int) -> jax.Array:
        return runner.prefill(sets[index % 2], _no_rows).sampled.tokens

    times = measure(prefill, repeat)
    runner.release()
    work = prefill_work(subject.model.family, subject.cfg, [(0, length)] * sequences)
    rate = f"{tokens / np.median(times):.0f} tok/s, {work.operations / np.median(times) / 1e12:.3g} TFLOP/s"
    return [Figure(f"prefill {sequences} x {length}", times, ceilings.seconds(work), rate)]


def bench_decode(subject: Subject, context: int, batches: Sequence[int], repeat: int) -> list[Figure]:
    """Decode steps of each batch size, with `context` tokens a sequence."""
    ceilings = subject.ceilings(repeat)
    largest, pages = max(batches), _pages(context + STEPS)
    config = EngineConfig(max_batch_size=largest, max_num_tokens=largest, max_seq_len=pages * _PAGE)
    ladder = decode_ladder(config, subject.device.platform)
    sizes = {smallest_fit(ladder, batch) for batch in batches}
    steps = {name for size in sizes for name in (f"decode {size}", f"sample {size} greedy")}
    runner = _runner(subject, config, largest * pages, steps)
    rng = np.random.default_rng(0)
    requests = _requests(subject, largest, context, rng, spare=STEPS)
    figures = [_decode(subject, runner, ceilings, requests[:size], context, repeat) for size in batches]
    runner.release()
    return figures


def _decode(
    subject: Subject, runner: ModelRunner, ceilings: Ceilings, requests: list[Request], context: int, repeat: int
) -> Figure:
    def steps(_: int) -> jax.Array:
        for request in requests:
            request.computed = context - 1
        for _ in range(STEPS):
            last = runner.decode(requests)
            for request in requests:
                request.computed += 1
        return last.sampled.tokens

    times, batch = measure(steps, repeat, per_call=STEPS), len(requests)
    middle = context + STEPS // 2
    floor = ceilings.seconds(decode_work(subject.model.family, subject.cfg, batch, middle))
    return Figure(f"decode {batch}, context {context}", times, floor, f"{batch / np.median(times):.0f} tok/s")


def _requests(subject: Subject, count: int, length: int, rng: np.random.Generator, spare: int = 1) -> list[Request]:
    """Random prompts of `length` tokens, with pages for `spare` more."""
    model = subject.model
    requests = [make_request(model, f"r{i}", text_ids(model, length, rng)) for i in range(count)]
    place(requests, _pages(length + spare), rng)
    return requests


def _runner(subject: Subject, config: EngineConfig, num_blocks: int, steps: set[str]) -> ModelRunner:
    """A runner with random keys and values and the executables `steps` alone."""
    model, cfg = subject.model, subject.cfg
    config = resolve_engine(config, subject.device.platform, cfg.max_position_embeddings)
    rows = jax.device_put(jnp.zeros((1, cfg.row_width), cfg.dtype), subject.device)
    runner = ModelRunner(
        model.family,
        cfg,
        subject.params("text")["text"],
        config,
        device=subject.device,
        pool=lambda: rows,
        pool_rows=1,
        banned_ids=model.processor.never_sampled,
    )
    runner.set_num_blocks(num_blocks)
    jobs = [job for job in runner.jobs() if job.name in steps]
    names = {job.name for job in jobs}
    # Prompts without a prefix take the step that is made for them, where there is one.
    subject.compile([job for job in jobs if f"{job.name} without prefix" not in names])
    runner.allocate()
    _fill(runner)
    return runner


def _fill(runner: ModelRunner) -> None:
    """Random contents for every KV page: zeros would run faster than real ones."""
    draw = jax.jit(lambda kv, key: jax.random.normal(key, kv.shape, kv.dtype), donate_argnums=0)
    keys = jax.device_put(jax.random.split(jax.random.key(0), len(runner.state.kv)), runner.device)
    state, runner.state = runner.state, None
    runner.state = state.replace(kv=tuple(draw(kv, key) for kv, key in zip(state.kv, keys, strict=True)))


def _pages(tokens: int) -> int:
    return -(-tokens // _PAGE)


def _no_rows(request: Request, item: int) -> np.ndarray:
    raise AssertionError(f"{request.id} has no item {item}")
