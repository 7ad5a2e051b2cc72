# SPDX-License-Identifier: Apache-2.0
"""Work of the CPU alone: pixels to patches, digests, prompts, the arrays of a step, and scheduling a long queue."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mmjax.bench.report import Figure
from mmjax.bench.requests import make_request, place
from mmjax.bench.subject import Subject, text_ids
from mmjax.bench.timing import measure
from mmjax.config import EngineConfig, resolve_engine
from mmjax.encoder.buckets import build_ladder
from mmjax.encoder.budgets import EncoderBudgets, resolve_budgets
from mmjax.encoder.scheduler import MultimodalItemScheduler
from mmjax.engine.batch import Chunk, Layout, decode_arrays, prefill_arrays
from mmjax.engine.embedding import encoder_item
from mmjax.engine.pages import PageAllocator
from mmjax.engine.request import Request
from mmjax.engine.scheduler import Schedule, Scheduler
from mmjax.inputs.hashing import ImageData, item_digest
from mmjax.inputs.prepare import prepare_prompt
from mmjax.inputs.prompt import ItemInput
from mmjax.models.family import Model
from mmjax.sampling_params import sampling_arrays

_PICTURES = ((1008, 1008), (1080, 1920), (3000, 4000))  # height x width
_BATCH, _CHUNK, _PAGE = 256, 8192, 64  # an engine on a GPU, whatever this machine has
_PROMPT = 64  # text tokens of a queued request


def bench_host(subject: Subject, queued: int, repeat: int) -> list[Figure]:
    """All of it; nothing touches a device."""
    rng = np.random.default_rng(0)
    return [
        *_pictures(subject.model, rng, repeat),
        *_prompts(subject.model, rng, repeat),
        *_step_arrays(subject.model, rng, repeat),
        _schedule(subject.model, rng, queued, repeat),
    ]


def _pictures(model: Model, rng: np.random.Generator, repeat: int) -> list[Figure]:
    figures = []
    for height, width in _PICTURES:
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        rows = model.processor.plan_image(height, width, {}).rows
        times = measure(lambda _, pixels=pixels: model.processor.image(pixels, {}) and None, repeat)
        figures.append(Figure(f"preprocess {width} x {height}", times, note=f"{rows} rows"))
        times = measure(lambda _, pixels=pixels: item_digest(ImageData(pixels)), repeat)
        rate = pixels.nbytes / np.median(times) / 1e9
        figures.append(Figure(f"hash {width} x {height}", times, note=f"{rate:.3g} GB/s"))
    return figures


def _prompts(model: Model, rng: np.random.Generator, repeat: int) -> list[Figure]:
    """Placeholders, masks, runs, positions and keys of whole prompts, behind the tokenizer."""
    figures = []
    for images in (0, 1, 100):
        ids, items = _parts(model, rng, 1024, images)
        times = measure(lambda _, ids=ids, items=items: _prepare(model, ids, items), repeat)
        size = len(_prepare(model, ids, items).token_ids)
        figures.append(Figure(f"prepare_prompt, {images} images", times, note=f"{size} tokens, block keys included"))
    return figures


def _prepare(model: Model, ids: np.ndarray, items: Sequence[ItemInput]):
    prompt = prepare_prompt(ids, items, model.processor, vocab_size=model.cfg.vocab_size)
    prompt.block_keys(_PAGE)
    return prompt


def _parts(
    model: Model, rng: np.random.Generator, words: int, images: int, side: int = 448
) -> tuple[np.ndarray, list[ItemInput]]:
    """Compact ids of `words` text tokens with the pictures behind them, and the pictures, without pixels."""
    plan = model.processor.plan_image(side, side, {})
    placeholder = np.full(images, model.processor.placeholder_id[plan.modality], np.int32)
    items = [ItemInput(plan, digest=rng.bytes(32).hex()) for _ in range(images)]
    return np.concatenate([text_ids(model, words, rng), placeholder]), items


def _step_arrays(model: Model, rng: np.random.Generator, repeat: int) -> list[Figure]:
    """What the engine makes for the device between two steps."""
    context, vocab_size = 1024, model.cfg.vocab_size
    pages = context // _PAGE + 1
    layout = Layout(_PAGE, _BATCH * pages, pages, _BATCH, 1, model.cfg.position_axes)
    requests = [make_request(model, f"r{i}", text_ids(model, context, rng)) for i in range(_BATCH)]
    place(requests, pages, rng)
    chunks = [Chunk(request, 0, context) for request in requests[: _CHUNK // context]]
    for request in requests:
        request.computed = context

    def decode(_: int) -> None:
        decode_arrays(requests, _BATCH, layout)
        sampling_arrays([request.sampling_row for request in requests], _BATCH, vocab_size)

    def prefill(_: int) -> None:
        prefill_arrays(chunks, _CHUNK, len(chunks), layout, None)

    return [
        Figure(f"arrays of a decode step, batch {_BATCH}", measure(decode, repeat)),
        Figure(f"arrays of a prefill step, {len(chunks)} x {context}", measure(prefill, repeat)),
    ]


def _schedule(model: Model, rng: np.random.Generator, queued: int, repeat: int) -> Figure:
    """One step of both schedulers, at a full batch, with `queued` requests of one picture each in the line."""
    budgets = _budgets(model)
    items = MultimodalItemScheduler(budgets, build_ladder(budgets, model.processor, model.cfg))
    config = resolve_engine(
        EngineConfig(max_batch_size=_BATCH, max_num_tokens=_CHUNK, max_seq_len=4096), "gpu", 1 << 20
    )
    scheduler = Scheduler(config, PageAllocator(_BATCH * 4096 // _PAGE, _PAGE), items)
    for arrival in range(queued):
        request = _queued(model, rng, arrival)
        items.admit(request.id, [encoder_item(item) for item in request.prompt.items])
        scheduler.add(request)
    times: list[float] = []
    most = 16 * (_BATCH + repeat)  # steps until the batch is full are not timed
    for _ in range(most):
        start = time.perf_counter()
        schedule = scheduler.schedule()
        items.commit(schedule.encode)
        seconds = time.perf_counter() - start
        _advance(scheduler, schedule)
        if len(schedule.decodes) >= min(_BATCH, queued) - 1:
            times.append(seconds)
            _finish_some(scheduler)
        if len(times) == repeat or not (schedule.decodes or schedule.chunks):
            break
    note = f"{len(scheduler.waiting)} waiting, {len(scheduler.running)} running"
    return Figure(f"schedule a step, {queued} queued", times, note=note)


def _queued(model: Model, rng: np.random.Generator, arrival: int) -> Request:
    request = make_request(model, f"r{arrival}", *_parts(model, rng, _PROMPT, 1, 224), page=_PAGE)
    for item in request.prompt.items:
        item.patches = np.zeros(0, np.uint8)  # stands for pixels that are there
    request.arrival = arrival
    return request


def _budgets(model: Model) -> EncoderBudgets:
    tokens = max(_CHUNK, *model.processor.max_tokens_per_item().values())
    return resolve_budgets(model.processor, model.cfg, max_batch_size=_BATCH, max_num_tokens=tokens)


def _advance(scheduler: Scheduler, schedule: Schedule) -> None:
    """What an engine does after it has dispatched a step."""
    for request in schedule.decodes:
        request.computed += 1
    for chunk in schedule.chunks:
        chunk.request.computed = chunk.end
        scheduler.items.advance(chunk.request.id, chunk.end)


def _finish_some(scheduler: Scheduler) -> None:
    """One answer ends, so that the next step has somebody to admit."""
    scheduler.remove(scheduler.running[0])
