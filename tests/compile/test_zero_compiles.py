# SPDX-License-Identifier: Apache-2.0
"""Claim: after start-up nothing compiles, whatever is asked within the limits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from llm_kit import CHECKPOINT, build, clip, noise, png, serving, user

import mmjax
from mmjax.compilation import CompileCounter

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "hyperclovax")
REQUESTS = 200


@contextmanager
def compile_events() -> Iterator[list[str]]:
    """Names of everything that XLA compiles, or fetches from its cache, in this process meanwhile."""
    events = []

    def listen(event: str, duration: float, **details: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def side(rng: random.Random) -> int:
    """1 to 700 pixels, all magnitudes alike."""
    return round(2 ** rng.uniform(0, 9.45))


def picture(rng: random.Random) -> np.ndarray:
    height, width = side(rng), side(rng)
    longest = 200 * min(height, width)
    return noise(min(height, longest), min(width, longest), rng.randrange(2**32))


def conversation(rng: random.Random) -> list[dict]:
    """Text alone, one to three pictures, or a clip, with text of any length around them."""
    text = "".join(rng.choices("what is it? ", k=round(2 ** rng.uniform(0, 8))))
    kind = rng.random()
    if kind < 0.25:
        return user(text)
    if kind < 0.4:
        return user(clip(rng.randint(1, 6), side(rng) + 13, side(rng) + 13, rng.randrange(2**32)), text)
    pictures = [picture(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    return user(*pictures, text)


def parameters(rng: random.Random) -> mmjax.SamplingParams:
    return mmjax.SamplingParams(
        max_tokens=rng.randint(1, 8),
        temperature=rng.choice((0.0, 0.7)),
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.8)),
        min_p=rng.choice((0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.5)),
        logprobs=rng.choice((None, 3)),
        stop=rng.choice(((), ("e",))),
        min_tokens=rng.choice((0, 1)),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_200_random_requests_compile_nothing(tiny_checkpoint, family):
    rng = random.Random(0)
    with build(tiny_checkpoint(family, **CHECKPOINT).path) as llm, compile_events() as events:
        sent = 0
        while sent < REQUESTS:
            size = min(rng.choice((1, 1, 2, 5, 9)), REQUESTS - sent)
            conversations = [conversation(rng) for _ in range(size)]
            outs = llm.chat(conversations, [parameters(rng) for _ in range(size)])
            assert [out.error for out in outs if out.error is not None] == []
            sent += size
        rows = llm.encode([picture(rng), png(picture(rng))])
        zeros = np.zeros_like(llm.encode([noise(90, 130)])[0])
        given = llm.chat(user(noise(90, 130), "?"), multi_modal_embeddings={"image": [zeros]})
        stats = llm.stats()
    assert given.metrics.items_encoded == 0
    assert len(rows) == 2
    assert events == []
    assert (stats.compiles["since"], stats.compiles["names"]) == (0, [])
    assert stats.items["items_encoded"] > REQUESTS / 2
    assert len(stats.items["padding"]["buckets"]) > 1


def test_host_limits_compile_nothing(tiny_llm):
    """Budgets, chunk sizes, pages and policies under the shapes that are compiled."""
    llm, rng = tiny_llm(), random.Random(1)
    with compile_events() as events:
        for limits in (
            {"chunk_tokens": 7},
            {"block_limit": 40},
            {"enable_block_reuse": False, "disable_overlap_scheduler": True},
            {"multimodal": {"encoder_scheduling_policy": "eager"}, "budgets": {"batch_size": 1}},
            {"multimodal": {"encoder_scheduling_policy": "disabled", "encoder_tokens_while_decoding": 256}},
        ):
            with serving(llm, **limits):
                outs = llm.chat([conversation(rng) for _ in range(6)], mmjax.SamplingParams(max_tokens=4))
                assert [out.error for out in outs if out.error is not None] == []
    assert events == []


def test_the_counter_does_count(tiny_llm):
    """A compilation outside shows up in both counts."""
    counter = CompileCounter().start()
    try:
        with compile_events() as events:
            jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    finally:
        counter.stop()
    assert len(events) == counter.count == 1
