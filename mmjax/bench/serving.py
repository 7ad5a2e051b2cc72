# SPDX-License-Identifier: Apache-2.0
"""What a user feels: time to the first token, and requests a second, host work included."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mmjax.bench.floors import Ceilings, decode_work, encoder_work, prefill_work
from mmjax.bench.report import Figure
from mmjax.bench.subject import Subject, noise
from mmjax.config import EngineConfig
from mmjax.llm import LLM
from mmjax.outputs import RequestOutput
from mmjax.sampling_params import SamplingParams

_WORDS = ("what", "which", "where", "colour", "shape", "left", "right", "under", "above", "count", "of", "the", "is")


@contextmanager
def serving(subject: Subject, engine: EngineConfig) -> Iterator[LLM]:
    """An engine with the subject's parameters."""
    params = subject.params("vision", "text")
    with LLM.of(subject.model, params, engine=engine, device=subject.device, progress=False) as llm:
        yield llm


def bench_first_token(subject: Subject, side: int, words: int, repeat: int) -> list[Figure]:
    """One request at a time: a new picture; the same with another question before it; the next turn of that talk."""
    ceilings, rng = subject.ceilings(repeat), np.random.default_rng(0)
    outputs: dict[str, list[tuple[float, RequestOutput]]] = defaultdict(list)
    with serving(subject, EngineConfig()) as llm:
        for _ in range(repeat + 1):
            for name, messages in first_token_talks(side, words, rng).items():
                outputs[name].append(_ask(llm, messages))
        plan = subject.model.processor.image(noise(side, rng), {}).plan
    tower = ceilings.seconds(encoder_work(subject.model.family, subject.cfg, [plan]))
    figures = []
    for name, runs in outputs.items():
        kept = runs[1:]  # the first round warms up
        usage, metrics = kept[-1][1].usage, kept[-1][1].metrics
        chunk = (usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens)
        floor = ceilings.seconds(prefill_work(subject.model.family, subject.cfg, [chunk]))
        floor += tower if metrics.items_encoded else 0.0
        note = f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached, {metrics.items_encoded} encoded"
        figures.append(Figure(name, [seconds for seconds, _ in kept], floor, note))
    return figures


def bench_throughput(subject: Subject, requests: int, new_tokens: int, side: int, repeat: int) -> list[Figure]:
    """`requests` at once, each with a picture of its own; times are of the whole load."""
    ceilings, rng, times = subject.ceilings(repeat), np.random.default_rng(0), []
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    with serving(subject, EngineConfig()) as llm:
        compiled_before = llm.stats().compiles["since"]
        for _ in range(repeat + 1):
            load = [image_question(side, 16, rng) for _ in range(requests)]
            start = time.perf_counter()
            outputs = llm.chat(load, params)
            times.append(time.perf_counter() - start)
        stats = llm.stats()
        batch = llm.running.config.max_batch_size
        plan = subject.model.processor.image(noise(side, rng), {}).plan
    prompt = outputs[0].usage.prompt_tokens
    floor = _load_floor(subject, ceilings, requests, prompt, new_tokens, batch, plan)
    rate = requests / np.median(times[1:])
    note = (
        f"{rate:.3g} requests/s, {rate * new_tokens:.0f} tok/s; a step's host time: median "
        f"{stats.steps['median_ms']:.3g}, 99th percentile {stats.steps['p99_ms']:.3g} ms; "
        f"{stats.compiles['since'] - compiled_before} compiles"
    )
    return [Figure(load_name(requests, side, new_tokens), times[1:], floor, note)]


def load_name(requests: int, side: int, new_tokens: int) -> str:
    """The figure's name of such a load."""
    return f"{requests} requests, image {side} x {side}, {new_tokens} tokens"


def _load_floor(subject, ceilings: Ceilings, requests: int, prompt: int, new_tokens: int, batch: int, plan) -> float:
    """Towers and prompts at the matrix ceiling, then decoding in full batches."""
    family, cfg = subject.model.family, subject.cfg
    seconds = ceilings.seconds(encoder_work(family, cfg, [plan] * requests))
    seconds += ceilings.seconds(prefill_work(family, cfg, [(0, prompt)] * requests))
    waves = [batch] * (requests // batch) + ([requests % batch] if requests % batch else [])
    middle = prompt + new_tokens // 2
    return seconds + sum(ceilings.seconds(decode_work(family, cfg, wave, middle)) * (new_tokens - 1) for wave in waves)


def _ask(llm: LLM, messages: list[dict]) -> tuple[float, RequestOutput]:
    start = time.perf_counter()
    output = llm.chat(messages, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - start, output


def first_token_talks(side: int, words: int, rng: np.random.Generator) -> dict[str, list[dict]]:
    """Conversations in the order in which they are asked: what each finds in the caches of an engine that has them."""
    image = {"type": "image", "image": noise(side, rng)}
    first = _turn(_text(words, rng), image)
    second = _turn(_text(words, rng), image)
    third = [*second, *_turn({"type": "text", "text": "Yes."}, role="assistant"), *_turn(_text(words, rng))]
    return {
        "first token, new image": first,
        "first token, same image, new question": second,
        "first token, same talk, next turn": third,
    }


def image_question(side: int, words: int, rng: np.random.Generator) -> list[dict]:
    """A conversation of one question about a new picture of `side` x `side` pixels."""
    return _turn(_text(words, rng), {"type": "image", "image": noise(side, rng)})


def text_question(words: int, rng: np.random.Generator) -> list[dict]:
    """A conversation of one question of so many words."""
    return _turn(_text(words, rng))


def _turn(*parts: dict, role: str = "user") -> list[dict]:
    return [{"role": role, "content": list(parts)}]


def _text(words: int, rng: np.random.Generator) -> dict:
    return {"type": "text", "text": " ".join(rng.choice(_WORDS, words))}
