# SPDX-License-Identifier: Apache-2.0
"""Claim: beside a language-model scheduler that fills its pages, requests that wait for all items end in fair order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from encoder_kit import make_ladder, make_scheduler

from mmjax.encoder.buckets import EncoderLoad
from mmjax.encoder.plan import Refusal
from mmjax.encoder.state import EncoderItem

BLOCK = 10


@dataclass
class Prompt:
    """A prompt of `length` tokens that ends with items of `rows` rows each."""

    request_id: str
    length: int
    rows: tuple[int, ...] = ()
    keys: tuple[str, ...] | None = None
    arrives: int = 1
    computed: int = 0
    pages: int = 0  # tokens, in whole blocks

    @property
    def items(self) -> list[EncoderItem]:
        first = self.length - sum(self.rows)
        items = []
        for i, rows in enumerate(self.rows):
            load = EncoderLoad(1, 4 * rows, 1, 0, rows)
            items.append(EncoderItem(self.keys and self.keys[i], load, first, first + rows - 1))
            first += rows
        return items


class Driver:
    """Chunked prefill, first come first served, over a pool of KV tokens; what does not fit is passed over."""

    def __init__(self, setup, prompts, decodes=None, retain=False):
        self.pool, self.max_num_tokens, tokens, slots = setup
        self.scheduler = make_scheduler(
            items=slots, tokens=tokens, rows=tokens // 4, retain=retain, ladder=make_ladder()
        )
        self.prompts = prompts
        self.decodes = decodes or {}  # tokens of the pool that others take, by pass; None for all that is free
        for prompt in prompts:
            self.scheduler.admit(prompt.request_id, prompt.items)

    def schedule(self, number: int) -> dict[str, int]:
        """Chunk ends by request, as a scheduler that knows nothing of items would set them."""
        waiting = {p.request_id: p for p in self.prompts if p.arrives <= number and p.computed < p.length}
        free = self.pool - sum(p.pages for p in self.prompts)
        taken = self.decodes.get(number, 0)
        free -= free if taken is None else taken
        tokens, ends = self.max_num_tokens, {}
        for prompt in map(waiting.get, self.scheduler.order(list(waiting))):
            chunk = min(prompt.length - prompt.computed, tokens)
            need = -(-(prompt.computed + chunk) // BLOCK) * BLOCK - prompt.pages
            if not chunk or max(need, 0) > free:
                continue
            free -= max(need, 0)
            prompt.pages += max(need, 0)
            tokens -= chunk
            ends[prompt.request_id] = prompt.computed + chunk
        return ends

    def run(self, passes=12) -> dict[str, int]:
        """{request: pass in which its prefill ends}."""
        done = {}
        for number in range(1, passes + 1):
            ends = self.schedule(number)
            self.scheduler.begin()
            for prompt in self.prompts:  # in order of admission
                if prompt.request_id not in ends:
                    continue
                claim = self.scheduler.claim(prompt.request_id, prompt.computed, ends[prompt.request_id])
                if claim.refusal is Refusal.ROWS:
                    prompt.pages = 0
            plan = self.scheduler.close()
            self.scheduler.commit(plan)
            for prompt in self.prompts:
                if prompt.request_id in ends:
                    prompt.computed = plan.chunk_end[prompt.request_id]
                    self.scheduler.advance(prompt.request_id, prompt.computed)
                if prompt.computed == prompt.length and prompt.request_id not in done:
                    done[prompt.request_id] = number
                    self.scheduler.remove(prompt.request_id)
                    prompt.pages = 0
        return done


def test_a_waiting_footprint_goes_behind_a_holder():
    prompts = [Prompt("1", 10, (1,)), Prompt("2", 40, (2, 1)), Prompt("3", 80, (1, 1))]
    assert Driver((80, 60, 12, 2), prompts).run() == {"1": 1, "3": 3, "2": 4}


def test_a_partly_encoded_holder_is_not_starved_of_tokens():
    prompts = [Prompt("1", 80, (1,)), Prompt("2", 20, (4, 4)), Prompt("3", 70)]
    assert Driver((100, 50, 32, 1), prompts, decodes={1: 60}).run() == {"2": 2, "1": 4, "3": 5}


def test_text_passes_a_wait_for_rows():
    prompts = [Prompt("1", 30, (2, 2, 2, 2)), Prompt("2", 10, (1,)), Prompt("3", 10, arrives=2)]
    assert Driver((1000, 60, 32, 1), prompts).run() == {"1": 4, "2": 5, "3": 2}


def test_a_wait_for_the_encoder_keeps_its_pages():
    prompts = [Prompt("1", 30, (1, 1)), Prompt("2", 10, (1,))]
    assert Driver((100, 60, 12, 1), prompts, decodes={2: None, 3: None, 4: None}).run() == {"1": 2, "2": 3}


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("ready", [False, True])
def test_sharing_what_a_younger_one_holds_needs_no_rows(retain, ready):
    prompts = [Prompt("older", 10, (3,), ("k",)), Prompt("newer", 10, (3,), ("k",))]
    driver = Driver((20, 10, 12, 1), prompts, retain=retain)
    plan = driver.scheduler.plan([("newer", 0, 10)])
    if ready:
        driver.scheduler.commit(plan)
    assert driver.run() == {"older": 1, "newer": 2}
    stats = driver.scheduler.cache.stats()
    assert (stats.reserved_bytes, stats.in_use_bytes, stats.current_bytes) == (0, 0, 12 if retain else 0)
