# SPDX-License-Identifier: Apache-2.0
"""Claim: whatever requests come and go, no block has two roles, and a reused block holds what the prompt says."""

from __future__ import annotations

import zlib
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from mmjax.engine.pages import PageAllocator

PAGE = 2


class Running:
    """A request: its tokens, its table, and how many tokens were computed."""

    def __init__(self, tokens, table, computed):
        self.tokens, self.table, self.computed = tokens, table, computed


class Requests(RuleBasedStateMachine):
    """Random prompts over two tokens, so that prefixes are shared often, in a pool that is too small for them.

    `kv` plays the device: what each block holds, prefix included. Keys are checksums of a few bits, so they collide.
    """

    running = Bundle("running")

    @initialize(num_blocks=st.integers(1, 9), key_bits=st.sampled_from([1, 3, 32]))
    def start(self, num_blocks, key_bits):
        self.pages = PageAllocator(num_blocks, PAGE)
        self.num_blocks, self.key_bits = num_blocks, key_bits
        self.kv: dict[int, tuple] = {}
        self.live: list[Running] = []
        self.clock = 0
        self.last_use: dict[int, int] = {}

    def keys(self, tokens):
        ends = range(PAGE, len(tokens) + 1, PAGE)
        return [(zlib.crc32(bytes(tokens[:end])) % 2**self.key_bits).to_bytes(4, "big") for end in ends]

    def watch_evictions(self, before: set[int]):
        """Known blocks that went must be the least recently used ones, or continue one of those."""
        gone = before - set(self.pages._cached) - {b for r in self.live for b in r.table}
        stayed = set(self.pages._cached) & before
        roots = [b for b in gone if not any(self.kv[b][: len(self.kv[p])] == self.kv[p] for p in gone - {b})]
        for block in roots:
            assert all(self.last_use[block] < self.last_use[other] for other in stayed)

    @rule(target=running, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), share=st.booleans())
    def admit(self, prompt, share):
        cached = set(self.pages._cached)
        keys = self.keys(prompt) if share else []
        available = self.pages.available
        table, reused = self.pages.match(keys, prompt, len(prompt) - 1)
        assert reused == PAGE * len(table) < len(prompt)
        for index, block in enumerate(table):
            assert self.kv[block] == tuple(prompt[: (index + 1) * PAGE])
        request = Running(prompt if share else None, table, reused)
        self.live.append(request)
        needed = -(-len(prompt) // PAGE)
        if not self.pages.ensure(table, len(prompt)):
            assert needed - reused // PAGE > self.pages.available
            self.release(request)
            assert self.pages.available == available
            return multiple()
        assert len(table) == needed
        self.watch_evictions(cached - set(table[: reused // PAGE]))
        self.compute(request, prompt, reused)
        return request

    def compute(self, request, tokens, start):
        """Writes KV of tokens[start:], in blocks that nobody else holds, then registers full blocks."""
        for index in range(start // PAGE, -(-len(tokens) // PAGE)):
            block = request.table[index]
            assert sum(block in other.table for other in self.live) == 1
            self.kv[block] = tuple(tokens[: (index + 1) * PAGE])
        request.computed = len(tokens)
        if request.tokens is not None:
            self.pages.register(request.table, self.keys(tokens), tokens)

    @rule(request=running, token=st.integers(0, 1))
    def decode(self, request, token):
        if request.tokens is None:
            return
        cached = set(self.pages._cached)
        if self.pages.ensure(request.table, request.computed + 1):
            self.watch_evictions(cached)
            request.tokens = [*request.tokens, token]
            start = request.computed
            self.compute(request, request.tokens, start)

    @rule(request=consumes(running))
    def finish(self, request):
        self.release(request)

    def release(self, request):
        for block in reversed(request.table):
            self.clock += 1
            self.last_use[block] = self.clock
        self.pages.free(request.table)
        assert request.table == []
        self.live.remove(request)

    @rule()
    def lose_the_device(self):
        self.pages.clear()
        assert self.pages.stats().cached == 0

    @invariant()
    def every_block_has_one_role(self):
        pages, held = self.pages, Counter(b for r in self.live for b in r.table)
        free, cached = pages._free, set(pages._cached)
        assert len(free) == len(set(free))
        assert set(free) | cached | set(held) == set(range(self.num_blocks))
        assert len(free) + len(cached) + len(held) == self.num_blocks
        assert pages._references == [held[b] for b in range(self.num_blocks)]
        stats = pages.stats()
        assert (stats.free, stats.cached, stats.in_use) == (len(free), len(cached), len(held))

    @invariant()
    def known_blocks_form_trees_that_keys_reach(self):
        pages = self.pages
        assert set(pages._cached) <= set(pages._entries)
        assert {entry.key: block for block, entry in pages._entries.items()} == pages._by_key
        for block, entry in pages._entries.items():
            assert entry.tokens == self.kv[block][-PAGE:]
            prefix = self.kv[block][:-PAGE]
            assert prefix == (() if entry.parent is None else self.kv[entry.parent])
            if entry.parent is not None:
                assert block in pages._entries[entry.parent].children
            assert all(pages._entries[child].parent == block for child in entry.children)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
