# SPDX-License-Identifier: Apache-2.0
"""Tiny engines, messages and pictures for tests of the whole path.

One `LLM` a family is compiled for all tests. `serving` puts a fresh engine (empty caches, other host limits) over its
executables, so that no test sees another's state and nothing compiles again.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from PIL import Image

import mmjax
from mmjax.engine.trace import StepTrace
from mmjax.startup import serve

CHECKPOINT = {"layers": 2, "vision_depth": 2, "video_blocks": 8, "max_frames": 6}
ENGINE = mmjax.EngineConfig(
    max_batch_size=4, max_num_tokens=128, max_seq_len=512, tokens_per_block=16, num_blocks=160, compilation_cache=False
)
MULTIMODAL = mmjax.MultimodalConfig(encoder_max_num_tokens=512, encoder_cache_max_bytes="128KiB")
GREEDY = mmjax.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def build(path: Any, *, reference: bool = False, engine: Any = ENGINE, multimodal: Any = MULTIMODAL) -> mmjax.LLM:
    """An LLM in exact float32 on whatever device there is."""
    with jax.default_matmul_precision("highest"):
        return mmjax.LLM(
            path, dtype="float32", engine=engine, multimodal=multimodal, reference=reference, progress=False
        )


@contextmanager
def serving(
    llm: mmjax.LLM, *, trace: int = 0, multimodal: dict | None = None, budgets: dict | None = None, **limits: Any
) -> Iterator[mmjax.LLM]:
    """`llm` over a fresh engine.

    Args:
      trace: rows of the step trace to keep.
      multimodal, budgets, limits: fields of MultimodalConfig, EncoderBudgets and EngineConfig that are host limits.
    """
    machine = llm.running.machine
    before = llm.running

    def fresh(**parts: Any) -> Any:
        return serve(machine, replace(llm.multimodal, **(multimodal or {})), llm._media, **parts)

    before.close()
    llm.running = fresh(
        config=replace(machine.config, **limits),
        budgets=replace(machine.budgets, **(budgets or {})),
        trace=StepTrace(trace),
    )
    try:
        yield llm
    finally:
        llm.running.close()
        llm.running = serve(machine, llm.multimodal, llm._media)


@contextmanager
def together(llm: mmjax.LLM) -> Iterator[None]:
    """Holds the engine between two steps, so that all that is submitted meanwhile arrives at once."""
    ready, go = threading.Event(), threading.Event()
    engine = llm.running

    def wait() -> None:
        ready.set()
        go.wait()

    holder = threading.Thread(target=engine.call, args=(wait,))
    holder.start()
    ready.wait()
    try:
        yield
    finally:
        go.set()
        holder.join()


def held(llm: mmjax.LLM) -> dict[str, int]:
    """What requests hold at the moment, by kind; everything is 0 when the engine is idle."""
    service = llm.running

    def count() -> dict[str, int]:
        rows, scheduler = service.items.cache.stats(), service.scheduler
        return {
            "pages": service.pages.stats().in_use,
            "row bytes": rows.in_use_bytes + rows.reserved_bytes,
            "requests": len(service.engine._requests),
            "queued": len(scheduler.waiting) + len(scheduler.running) + len(scheduler.embedding),
            "item states": len(service.items._states),
            "slots": service.config.max_batch_size - len(scheduler._free_slots),
        }

    return service.call(count)


def assert_nothing_held(llm: mmjax.LLM) -> None:
    """Pages, rows, slots and states are all given back."""
    assert {kind: number for kind, number in held(llm).items() if number} == {}


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def clip(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Frames, uint8 [frames, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def user(*parts: Any) -> list[dict]:
    """A conversation of one message: text, pictures (arrays [h, w, 3] or bytes), clips (arrays [f, h, w, 3])."""
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif (isinstance(part, np.ndarray) and part.ndim == 4) or isinstance(part, tuple):
            content.append({"type": "video", "video": part})
        else:
            content.append({"type": "image", "image": part})
    return [{"role": "user", "content": content}]
