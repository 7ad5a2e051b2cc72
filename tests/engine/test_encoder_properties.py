# SPDX-License-Identifier: Apache-2.0
"""Claim: whatever the pool, the requests and what goes wrong, each step makes progress, rows are right, all end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from encoder_kit import make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.encoder.buckets import EncoderLoad
from mmjax.encoder.plan import EncodePlan
from mmjax.encoder.state import EncoderItem
from mmjax.encoder.step import MultimodalEncoderContractError, MultimodalEncoderOutputError

PAGE = 4


@dataclass
class Prompt:
    request_id: str
    items: list[EncoderItem]
    length: int
    hit: int  # tokens that the prefix cache serves
    started: bool = False
    computed: int = 0
    pages: int = 0
    rows: list[int] = field(default_factory=list)  # for each prompt position: 1 if it takes a row

    def __post_init__(self):
        self.rows = [0] * self.length
        for item in self.items:
            self.rows[item.first : item.last + 1] = [1] * item.load.rows

    def expected(self, begin: int, end: int) -> list[tuple]:
        """What the rows of positions [begin, end) must hold: (whose content, row of the item)."""
        found = []
        for i, item in enumerate(self.items):
            name = item.key or (self.request_id, i)
            found += [(name, p - item.first) for p in range(max(begin, item.first), min(end, item.last + 1))]
        return found


class Engine:
    """The smallest loop that serves prompts: pages with preemption of the youngest, chunks, a stub encoder.

    `pool` stands for the device's row pool: it holds the name of what was last written to each row. Pixels are dropped
    when rows are pinned; whoever needs them again has them a step later.
    """

    def __init__(self, scheduler, prompts, tokens, pages):
        self.scheduler, self.tokens, self.free = scheduler, tokens, pages
        self.waiting, self.running, self.done = list(prompts), [], []
        self.pool: list[tuple | None] = [None] * scheduler.cache.capacity_rows
        self.encodes: Counter = Counter()
        self.preempted = self.restored = 0
        for prompt in prompts:
            scheduler.admit(prompt.request_id, prompt.items)

    def step(self, cap=None, ahead=False, error=None, leaves=()) -> int:
        """One engine step; returns the prompt tokens that it computed."""
        self.running += self.waiting
        self.waiting = []
        self.scheduler.begin(cap)
        chunks, budget = {}, self.tokens
        for name in self.scheduler.order([p.request_id for p in self.running]):
            prompt = next((p for p in self.running if p.request_id == name), None)
            if prompt is None or not budget:
                continue
            if not prompt.started:
                prompt.started, prompt.computed = True, prompt.hit
            end = self.scheduler.claim(name, prompt.computed, min(prompt.length, prompt.computed + budget)).end
            if end > prompt.computed and self.make_room(prompt, end):
                chunks[name] = end
                budget -= end - prompt.computed
        if ahead:
            self.scheduler.look_ahead([p.request_id for p in self.running + self.waiting])
        for name in leaves:
            self.remove(name)
        plan = self.scheduler.close()
        self.restore(plan)
        if error is not None and plan.items:
            self.fail(plan, error)
        else:
            self.encode(plan)
        return sum(
            self.prefill(prompt, min(chunks[prompt.request_id], plan.chunk_end[prompt.request_id]))
            for prompt in list(self.running)
            if prompt.request_id in chunks
        )

    def make_room(self, prompt: Prompt, end: int) -> bool:
        need = -(-end // PAGE) - prompt.pages
        while need > self.free:
            victim = self.running[-1]
            self.running.remove(victim)
            self.waiting.insert(0, victim)
            self.scheduler.release(victim.request_id)
            self.free += victim.pages
            victim.pages, victim.computed, victim.started = 0, 0, False
            self.preempted += 1
            if victim is prompt:
                return False
        self.free -= max(need, 0)
        prompt.pages += max(need, 0)
        return True

    def encode(self, plan: EncodePlan) -> None:
        for batch in plan.batches:
            assert batch.load == EncoderLoad.total(item.load for item in batch.items)
            for item in batch.items:
                self.encodes[item.key] += 1
                name = (item.request_id, item.item) if item.key[0] == "mm_transient" else item.key
                for row, slot in enumerate(item.slots):
                    self.pool[slot] = (name, row)
        for ref in self.scheduler.commit(plan):
            self.scheduler.set_pixels(*ref, False)

    def restore(self, plan: EncodePlan) -> None:
        for ref in plan.lacking_pixels:
            self.scheduler.set_pixels(*ref, True)
            self.restored += 1

    def fail(self, plan: EncodePlan, error: str) -> None:
        first = plan.items[0]
        raised = {
            "contract": MultimodalEncoderContractError("bad grid", [first.request_id]),
            "output": MultimodalEncoderOutputError("bad shape", [first.key]),
        }[error]
        for name in self.scheduler.fail(plan, raised):
            self.remove(name)
        for prompt in self.running:  # the others use what is there
            end = self.scheduler.ready_end(prompt.request_id, prompt.computed, prompt.length)
            plan.chunk_end[prompt.request_id] = min(plan.chunk_end.get(prompt.request_id, 0), end)

    def prefill(self, prompt: Prompt, end: int) -> int:
        begin = prompt.computed
        if end <= begin:
            return 0
        cached, in_chunk = sum(prompt.rows[:begin]), sum(prompt.rows[begin:end])
        slots = self.scheduler.chunk_slots(prompt.request_id, cached, in_chunk)
        assert [self.pool[slot] for slot in slots] == prompt.expected(begin, end)
        prompt.computed = end
        self.scheduler.advance(prompt.request_id, end)
        if end == prompt.length:
            self.remove(prompt.request_id)
            self.done.append(prompt.request_id)
        return end - begin

    def remove(self, name: str) -> None:
        self.scheduler.remove(name)
        for queue in (self.running, self.waiting):
            for prompt in [p for p in queue if p.request_id == name]:
                queue.remove(prompt)
                self.free += prompt.pages
                prompt.pages = 0

    def drained(self) -> None:
        stats = self.scheduler.cache.stats()
        assert (stats.in_use_bytes, stats.reserved_bytes) == (0, 0)
        self.scheduler.invalidate()


@st.composite
def prompts(draw, largest: int, most_items: int = 4):
    """One to six prompts whose items have 1 to `largest` rows; some share pictures, some can't be shared."""
    result = []
    for number in range(draw(st.integers(1, 6))):
        items, position = [], draw(st.integers(0, 3))
        for _ in range(draw(st.integers(0, most_items))):
            rows = draw(st.integers(1, largest))
            key = draw(st.none() | st.integers(0, 2).map(lambda k, rows=rows: ("image", k, rows)))
            load = EncoderLoad(1, 4 * rows, 1, 0, rows)
            items.append(EncoderItem(key, load, position, position + rows - 1))
            position += rows + draw(st.integers(0, 3))
        length = position + draw(st.integers(1, 4))
        result.append(Prompt(str(number), items, length, draw(st.integers(0, length - 1) | st.just(0))))
    return result


def pages_for(queue) -> int:
    return max(-(-prompt.length // PAGE) for prompt in queue)


@pytest.mark.parametrize("policy", ["default", "disabled"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_chunks_drain_whatever_the_pool(policy, data):
    largest = data.draw(st.integers(1, 6))
    queue = data.draw(prompts(largest))
    rows = data.draw(st.integers(largest, 3 * largest))
    scheduler = make_scheduler(
        policy, readiness="chunk", rows=rows, items=data.draw(st.integers(1, 3)),
        tokens=data.draw(st.integers(4 * largest, 50)), retain=data.draw(st.booleans()),
    )  # fmt: skip
    engine = Engine(scheduler, queue, data.draw(st.integers(1, 12)), pages_for(queue) + data.draw(st.integers(0, 8)))
    limit = 2 * sum(p.length for p in queue) + 50
    for _ in range(limit):
        if not engine.running + engine.waiting:
            break
        before = engine.preempted + engine.restored
        computed = engine.step(data.draw(st.none() | st.integers(1, 30)), ahead=data.draw(st.booleans()))
        assert computed or engine.preempted + engine.restored > before
    assert len(engine.done) == len(queue)
    engine.drained()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_failures_and_cancels_harm_nobody_else(data):
    queue = data.draw(prompts(4))
    scheduler = make_scheduler(
        readiness=data.draw(st.sampled_from(["chunk", "request"])), rows=16, output_rows=64, items=2, tokens=20
    )
    engine = Engine(scheduler, queue, data.draw(st.integers(1, 12)), sum(-(-p.length // PAGE) for p in queue))
    troubled = 0
    while engine.running + engine.waiting:
        error = data.draw(st.sampled_from([None, "contract", "output"])) if troubled < 6 else None
        names = [p.request_id for p in engine.running + engine.waiting]
        leaves = data.draw(st.lists(st.sampled_from(names), max_size=1)) if troubled < 6 else []
        before = sum(engine.encodes.values()) + engine.restored
        computed = engine.step(error=error, leaves=leaves, ahead=data.draw(st.booleans()))
        trouble = bool(error or leaves)
        troubled += trouble
        assert computed or trouble or sum(engine.encodes.values()) + engine.restored > before
    engine.drained()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_requests_that_wait_for_all_items_drain(data):
    queue = data.draw(prompts(3))
    rows = data.draw(st.integers(12, 20))
    scheduler = make_scheduler(
        rows=rows,
        items=data.draw(st.integers(1, 3)),
        tokens=data.draw(st.integers(12, 40)),
        retain=data.draw(st.booleans()),
    )
    engine = Engine(scheduler, queue, data.draw(st.integers(4, 12)), sum(-(-p.length // PAGE) for p in queue))
    items = sum(len(p.items) for p in queue)
    for _ in range(sum(p.length for p in queue) + 2 * items + 10):
        if not engine.running + engine.waiting:
            break
        encoded = sum(engine.encodes.values())
        assert engine.step() or sum(engine.encodes.values()) > encoded
    assert len(engine.done) == len(queue)
    engine.drained()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_in_a_roomy_pool_each_picture_is_encoded_once(data):
    queue = data.draw(prompts(4))
    for prompt in queue:
        prompt.hit = 0
    scheduler = make_scheduler(readiness=data.draw(st.sampled_from(["chunk", "request"])), rows=200, items=3)
    engine = Engine(scheduler, queue, data.draw(st.integers(1, 12)), sum(-(-p.length // PAGE) for p in queue))
    while engine.running + engine.waiting:
        engine.step(ahead=data.draw(st.booleans()))
    pictures = {item.key or ("mm_transient", p.request_id, i) for p in queue for i, item in enumerate(p.items)}
    assert engine.encodes == dict.fromkeys(pictures, 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_large_item_waits_for_its_seniors_only(data):
    """An endless stream of small, shared and unshared items behind a large one."""
    rows = data.draw(st.integers(4, 10))
    large = EncoderItem(None, EncoderLoad(1, 4, 1, 0, data.draw(st.integers(1, rows))), 0, rows - 1)
    scheduler = make_scheduler(readiness="chunk", rows=rows)
    live: dict[str, tuple[int, EncoderItem]] = {}
    waited = 0
    for number in range(50):
        if number == 5:
            scheduler.admit("large", [large])
            live["large"] = (0, large)
        small = data.draw(st.integers(1, min(3, rows)))
        key = data.draw(st.none() | st.just(("image", small)))
        item = EncoderItem(key, EncoderLoad(1, 4, 1, 0, small), 0, data.draw(st.integers(0, 4)))
        scheduler.admit(str(number), [item])
        live[str(number)] = (0, item)
        plan = scheduler.plan([(name, done, done + 1) for name, (done, _) in live.items()])
        scheduler.commit(plan)
        for name, (_, held) in list(live.items()):
            scheduler.advance(name, plan.chunk_end[name])
            live[name] = (plan.chunk_end[name], held)
            if name != "large" and plan.chunk_end[name] > held.last:
                scheduler.remove(name)
                del live[name]
        if "large" in live and not live["large"][0]:
            waited += 1
    assert waited <= 5 * 5  # five seniors, which hold their rows for five steps at most
