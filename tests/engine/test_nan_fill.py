# SPDX-License-Identifier: Apache-2.0
"""Claim: what is unused is never read: NaN in free pages, page tails, pool rows and padded pixels changes no bit."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from llm_kit import clip, noise, serving, together, user

import mmjax
from mmjax.encoder.cache import EntryState
from mmjax.inputs.items import Modality

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "lighton_ocr", "mistral3", "pixtral")
HOLE = 255  # a byte that no picture here holds after resizing


def calm(pixels: np.ndarray) -> np.ndarray:
    """The same noise in 64..191: resizing overshoots by less than that."""
    return pixels // 2 + 64


REQUESTS = [
    (user(calm(noise(84, 140, 1)), "what?"), {"logprobs": 20}),
    (user("a word"), {"logprobs": 20, "repetition_penalty": 1.3}),
    (user(calm(noise(56, 112, 2)), "and", calm(noise(150, 90, 3)), "which?"), {"logprobs": 20}),
    (user(calm(clip(5, 56, 84, 4)), "where to?"), {"logprobs": 20, "temperature": 0.8, "seed": 7}),
    (user("tell me about " * 12), {"logprobs": 20}),
]
LIMITS = {"chunk_tokens": 24}  # chunks end inside pictures, pages hold tails of several chunks


class Poison:
    """Before each step, overwrites with NaN what holds nothing: on the device, through the runners' own arrays."""

    def __init__(self, service):
        self.service, self.machine = service, service.machine
        self.poisoned: Counter[str] = Counter()

    def pages(self, spare: bool = True) -> None:
        service, runner = self.service, self.machine.text
        free = np.ones((service.pages.num_blocks, service.pages.tokens_per_block), bool)
        if spare:
            free[list(service.pages._entries)] = False
            for request in service.scheduler.running:
                positions = np.arange(request.computed)
                page = service.pages.tokens_per_block
                free[np.asarray(request.table, int)[positions // page], positions % page] = False
        kv = []
        for layer in runner.state.kv:
            values = np.array(layer)
            values.transpose(0, 3, 1, 2, 4)[: len(free)][free] = np.nan
            kv.append(_on_device(values, runner.device))
        runner.state = runner.state.replace(kv=tuple(kv))
        self.poisoned["page slots"] += int(free.sum())
        self.poisoned["tails"] += int((free.any(axis=1) & ~free.all(axis=1)).sum())

    def rows(self) -> None:
        runner, cache = self.machine.encoder, self.service.items.cache
        free = np.ones(runner.pool_rows, bool)
        for entry in cache._entries.values():
            if entry.state is EntryState.READY:
                free[entry.slots] = False
        values = np.array(runner.pool)
        values[free] = np.nan
        runner.pool = _on_device(values, runner.device)
        self.poisoned["rows"] += int(free.sum())

    def pixels(self, items, bucket, pack):
        inputs = pack(items, bucket)
        count = int(inputs.num_patches)
        assert HOLE not in inputs.patches[:count]
        inputs.patches[count:] = HOLE
        inputs.positions[count:] = 10_000
        self.poisoned["patches"] += len(inputs.patches) - count
        return inputs

    def install(self, monkeypatch) -> None:
        engine, encoder = self.service.engine, self.machine.encoder

        def step(original=engine.step):
            self.pages()
            self.rows()
            return original()

        table = np.array(encoder._table)
        table[:, HOLE] = np.nan
        monkeypatch.setattr(encoder, "_table", _on_device(table, encoder.device))
        monkeypatch.setattr(encoder, "pack", lambda items, bucket, pack=encoder.pack: self.pixels(items, bucket, pack))
        monkeypatch.setattr(engine, "step", step)


def _on_device(values: np.ndarray, device) -> jax.Array:
    return jax.block_until_ready(jax.device_put(values.copy(), device))


def holds_clip(messages: list[dict]) -> bool:
    return any(part["type"] == "video" for part in messages[0]["content"])


def ask(llm) -> list:
    """All that arithmetic decides about two rounds of requests; the second finds pages and rows in the caches."""
    takes_clips, seen = Modality.VIDEO in llm.model.processor.placeholder_id, []
    requests = [(messages, own) for messages, own in REQUESTS if takes_clips or not holds_clip(messages)]
    for _ in range(2):
        with together(llm):
            handles = [
                llm.submit(
                    messages, mmjax.SamplingParams(**{"max_tokens": 10, "temperature": 0.0, "ignore_eos": True} | own)
                )
                for messages, own in requests
            ]
        for handle in handles:
            out = handle.result()
            seen.append((out.token_ids, [(step.logprob, list(step.top.items())) for step in out.logprobs]))
    seen += [rows.tobytes() for rows in llm.encode([REQUESTS[0][0][0]["content"][0]["image"], calm(noise(200, 60, 9))])]
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_in_all_that_is_unused_changes_no_bit(tiny_llm, family, monkeypatch):
    with serving(tiny_llm(family), **LIMITS) as llm:
        clean = ask(llm)
    with serving(tiny_llm(family), **LIMITS) as llm:
        poison = Poison(llm.running)
        llm.running.call(lambda: poison.install(monkeypatch))
        dirty = ask(llm)
        llm.running.call(monkeypatch.undo)
    assert dirty == clean
    assert all(poison.poisoned[kind] > 50 for kind in ("page slots", "tails", "rows", "patches")), poison.poisoned


def test_nan_in_used_pages_does_show(llm, monkeypatch):
    """The poison works: without sparing what is used, nothing but NaN comes out from there on."""
    poison, steps = Poison(llm.running), iter(range(1000))

    def step(original=llm.running.engine.step):
        if next(steps) == 5:
            poison.pages(spare=False)
        return original()

    monkeypatch.setattr(llm.running.engine, "step", step)
    params = mmjax.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    logprobs = [step.logprob for step in llm.chat(user("a word"), params).logprobs]
    assert not np.isnan(logprobs[:3]).any()
    assert np.isnan(logprobs[8:]).all()
