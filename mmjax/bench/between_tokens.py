# SPDX-License-Identifier: Apache-2.0
"""Time between the tokens of answers in a full batch, alone and while pictures arrive, and what the device idles."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from mmjax.bench.report import Figure
from mmjax.bench.serving import image_question, serving, text_question
from mmjax.bench.subject import Subject
from mmjax.bench.text import bench_decode
from mmjax.config import EngineConfig
from mmjax.engine.handle import Handle
from mmjax.llm import LLM
from mmjax.outputs import Delta
from mmjax.sampling_params import SamplingParams


def bench_between_tokens(
    subject: Subject, batch: int, context: int, new_tokens: int, side: int, repeat: int
) -> list[Figure]:
    """`batch` answers of `new_tokens` to questions of about `context` tokens, all decoding at once.

    The share that the device idles compares the median time between two tokens with decode steps that never wait for
    the host. Traffic is one caller who sends a new picture of `side` x `side` as soon as the last is answered.
    """
    (step,) = bench_decode(subject, context, (batch,), repeat)
    with serving(subject, EngineConfig()) as llm:
        rng = np.random.default_rng(0)
        words = context * 100 // llm.count_tokens(text_question(100, rng)).prompt_tokens
        prompts = [text_question(words, rng) for _ in range(batch)]
        alone = [gap for _ in range(repeat) for gap in _gaps(llm, prompts, new_tokens)]
        with _Pictures(llm, side) as pictures:
            crowded = [gap for _ in range(repeat) for gap in _gaps(llm, prompts, new_tokens)]
    idle = max(0.0, 1 - step.median / np.median(alone))
    name = f"between tokens, batch {batch}, context {context}"
    return [
        step,
        Figure(name, alone, None, f"{_late(alone)}; the device idles {idle:.0%}", {"idle": idle}),
        Figure(f"{name}, pictures arriving", crowded, None, f"{_late(crowded)}; {pictures.count} pictures meanwhile"),
    ]


def _gaps(llm: LLM, prompts: list[list[dict]], new_tokens: int) -> list[float]:
    """Seconds between tokens of every answer, from when all have begun until the first is done."""
    times: list[list[float]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    handles = []
    for prompt, seen in zip(prompts, times, strict=True):
        handle = llm.submit(prompt, params)
        handle.subscribe(_clock(seen))
        handles.append(handle)
    for handle in handles:
        handle.result()
    begun, ended = max(seen[0] for seen in times), min(seen[-1] for seen in times)
    return [after - before for seen in times for before, after in pairwise(seen) if begun <= before and after <= ended]


def _clock(seen: list[float]) -> Callable[[object], None]:
    def note(part: object) -> None:
        if isinstance(part, Delta):
            seen.append(time.perf_counter())

    return note


class _Pictures:
    """A caller in a thread of its own who asks about one new picture after another, one token each."""

    def __init__(self, llm: LLM, side: int):
        self.count = 0
        self._llm, self._side, self._stop = llm, side, threading.Event()
        self._thread = threading.Thread(target=self._ask, name="mmjax-bench-pictures")

    def _ask(self) -> None:
        rng = np.random.default_rng(1)
        while not self._stop.is_set():
            handle: Handle = self._llm.submit(image_question(self._side, 16, rng), SamplingParams(max_tokens=1))
            handle.result()
            self.count += 1

    def __enter__(self) -> _Pictures:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def _late(gaps: list[float]) -> str:
    return f"99th percentile {np.percentile(gaps, 99) * 1e3:.3g} ms"
