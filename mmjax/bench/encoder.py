# SPDX-License-Identifier: Apache-2.0
"""The tower through `EncoderRunner`: so many pictures in one call."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from mmjax.bench.floors import encoder_work
from mmjax.bench.report import Figure
from mmjax.bench.subject import Subject, noise
from mmjax.bench.timing import measure
from mmjax.encoder.buckets import EncoderLoad, build_ladder
from mmjax.encoder.budgets import resolve_budgets
from mmjax.encoder.runner import EncoderRunner
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey

INPUT_SETS = 3  # rotated, so that no call finds its input in a cache


def bench_encoder(subject: Subject, counts: Sequence[int], side: int, repeat: int, *, exact: bool) -> list[Figure]:
    """Batches of `counts` pictures of `side` x `side` pixels.

    Args:
      exact: a bucket without padding instead of the one that an engine would take.
    """
    ceilings, params, figures = subject.ceilings(repeat), subject.params("vision")["vision"], []
    for count in counts:
        figures += _batch(subject, params, ceilings, count, side, repeat, exact)
    return figures


def _batch(subject, params, ceilings, count: int, side: int, repeat: int, exact: bool) -> list[Figure]:
    model, rng = subject.model, np.random.default_rng(count)
    batches = [[model.processor.image(noise(side, rng), {}) for _ in range(count)] for _ in range(INPUT_SETS)]
    plans = [item.plan for item in batches[0]]
    load = EncoderLoad(
        count,
        sum(plan.encoder_tokens for plan in plans),
        sum(len(plan.contexts) for plan in plans),
        sum(plan.windows for plan in plans),
        sum(plan.rows for plan in plans),
    )
    bucket = _exact_bucket(load) if exact else _engine_bucket(subject, load)
    runner = EncoderRunner(model.family, model.cfg, params, model.processor, [bucket], load.rows, device=subject.device)
    subject.compile([job for job in runner.jobs() if job.name.startswith("encode")])
    runner.allocate()
    inputs = [runner.pack(batch, bucket) for batch in batches]
    slots = [np.arange(load.rows, dtype=np.int32)]
    resident = jax.device_put(inputs, subject.device)

    def encode(sets: list) -> list[float]:
        def call(index: int) -> jax.Array:
            runner.encode(sets[index % len(sets)], slots, bucket)
            return runner.pool

        return measure(call, repeat)

    floor = ceilings.seconds(encoder_work(model.family, model.cfg, plans))
    size = f"{load.tokens} patches, {1 - load.tokens / bucket.key.total_tokens:.0%} padding"
    timed = {True: encode(resident), False: encode(inputs)}
    runner.release()
    return [
        Figure(
            encoder_name(count, side, resident=on_device),
            times,
            floor,
            f"{count / np.median(times):.3g} images/s, {size}",
        )
        for on_device, times in timed.items()
    ]


def encoder_name(count: int, side: int, *, resident: bool) -> str:
    """The figure's name of a batch whose pixels are on the device, or go there in the call."""
    return f"{count} x {side} x {side}, pixels {'on the device' if resident else 'uploaded'}"


def _exact_bucket(load: EncoderLoad) -> EncoderBucket:
    return EncoderBucket(EncoderGraphKey(load.tokens, load.contexts), load.windows, load.rows)


def _engine_bucket(subject: Subject, load: EncoderLoad) -> EncoderBucket:
    """Where an engine whose budget B admits the whole batch would put it."""
    processor, cfg = subject.model.processor, subject.cfg
    tokens = max(load.tokens, *processor.max_tokens_per_item().values())
    budgets = resolve_budgets(processor, cfg, max_batch_size=load.items, max_num_tokens=tokens)
    bucket = build_ladder(budgets, processor, cfg).fit(load)
    return _exact_bucket(load) if bucket is None else bucket
