# SPDX-License-Identifier: Apache-2.0
"""Claim: pages are counted exactly, known prefixes are shared only when equal, and the least recently used go first."""

from __future__ import annotations

import hashlib

import pytest

from mmjax.engine.pages import PageAllocator
from mmjax.errors import ConfigError, EngineError

PAGE = 4


def keys_of(tokens, salt=b"", page=PAGE):
    """Chained keys of the full blocks, as inputs/kv_key.py makes them."""
    keys, parent = [], salt
    for end in range(page, len(tokens) + 1, page):
        parent = hashlib.sha256(parent + repr(tokens[end - page : end]).encode()).digest()
        keys.append(parent)
    return keys


def _known(pages: PageAllocator, tokens) -> list[int]:
    """Computes a prompt, registers it, frees it; the block numbers it used."""
    table: list[int] = []
    assert pages.ensure(table, len(tokens))
    pages.register(table, keys_of(tokens), tokens)
    blocks = list(table)
    pages.free(table)
    return blocks


def _hit(pages: PageAllocator, tokens, max_tokens=None) -> list[int]:
    """Blocks that a lookup finds; references are given back."""
    table, count = pages.match(keys_of(tokens), tokens, len(tokens) if max_tokens is None else max_tokens)
    assert count == PAGE * len(table)
    blocks = list(table)
    pages.free(table)
    return blocks


def test_ensure_grows_by_whole_blocks_or_not_at_all():
    pages, table = PageAllocator(3, PAGE), []
    assert pages.ensure(table, 5)
    assert len(table) == 2
    assert pages.ensure(table, 8)
    assert len(table) == 2
    assert not pages.ensure(table, 17)
    assert len(table) == 2
    assert pages.available == 1
    assert pages.ensure(table, 12)
    assert sorted(table) == [0, 1, 2]
    assert pages.allocate(1) is None
    assert pages.allocate(0) == []


def test_freeing_twice_or_a_foreign_block_raises_and_changes_nothing():
    pages = PageAllocator(3, PAGE)
    table = pages.allocate(2)
    copy = list(table)
    pages.free(table)
    assert table == []
    pages.free(table)  # an emptied table holds nothing
    with pytest.raises(EngineError, match="more often"):
        pages.free(copy)
    with pytest.raises(EngineError, match="block 7"):
        pages.free([7])
    taken = pages.allocate(1)
    with pytest.raises(EngineError):
        pages.free(taken * 2)
    assert pages.stats().in_use == 1


def test_sizes_below_one_are_refused():
    with pytest.raises(ConfigError, match="num_blocks=0"):
        PageAllocator(0, 4)
    with pytest.raises(ConfigError, match="tokens_per_block=0"):
        PageAllocator(4, 0)


def test_a_prompt_that_begins_alike_reuses_whole_blocks():
    pages = PageAllocator(8, PAGE)
    first = list(range(11))
    blocks = _known(pages, first)
    assert pages.stats()[:4] == (8, 6, 2, 0)
    second = [*range(8), 90, 91, 92, 93]
    assert _hit(pages, second) == blocks[:2]
    assert _hit(pages, [0, 1, 2, 3, 50, 51, 52, 53]) == blocks[:1]
    assert _hit(pages, [9, *range(1, 8)]) == []
    stats = pages.stats()
    assert (stats.lookups, stats.hits, stats.reused_tokens, stats.evictions) == (3, 2, 12, 0)


@pytest.mark.parametrize(("length", "reused"), [(8, 1), (9, 2), (4, 0), (5, 1), (1, 0)])
def test_the_last_prompt_token_is_always_computed(length, reused):
    pages = PageAllocator(8, PAGE)
    _known(pages, list(range(12)))
    prompt = list(range(length))
    assert len(_hit(pages, prompt, max_tokens=length - 1)) == reused


def test_text_before_a_picture_is_shared_and_nothing_after_its_start():
    """8 text tokens, a picture of 6 rows, 6 text tokens; a picture's first key token is its digest."""
    pages = PageAllocator(16, PAGE)

    def prompt(digest):
        return [*range(8), digest, 1001, 1002, 1003, 1004, 1005, *range(20, 26)]

    _known(pages, prompt(b"cat"))
    assert len(_hit(pages, prompt(b"dog"), max_tokens=19)) == 2
    assert len(_hit(pages, prompt(b"cat"), max_tokens=19)) == 4


def test_no_keys_means_no_sharing():
    pages = PageAllocator(8, PAGE)
    tokens = list(range(8))
    _known(pages, tokens)
    assert pages.match([], tokens, 8) == ([], 0)


def test_a_salt_is_a_tree_of_its_own():
    pages = PageAllocator(8, PAGE)
    tokens = list(range(8))
    _known(pages, tokens)
    assert pages.match(keys_of(tokens, b"tenant"), tokens, 8) == ([], 0)


def test_equal_keys_of_different_tokens_are_told_apart():
    """Every key the same: only the stored tokens can tell."""
    pages = PageAllocator(8, PAGE)
    table = pages.allocate(2)
    pages.register(table, [b"k"], [1, 2, 3, 4])
    other = pages.allocate(2)
    pages.register(other, [b"k", b"l"], [5, 6, 7, 8, 9, 9, 9, 9])
    assert pages.match([b"k"], [5, 6, 7, 8], 4) == ([], 0)
    assert pages.match([b"k", b"l"], [5, 6, 7, 8, 9, 9, 9, 9], 8) == ([], 0)
    assert pages.match([b"k"], [1, 2, 3, 4], 4) == ([table[0]], 4)


def test_equal_blocks_under_different_parents_are_told_apart_in_spite_of_equal_keys():
    pages = PageAllocator(8, PAGE)
    same = [9, 9, 9, 9]
    first, second = pages.allocate(2), pages.allocate(2)
    pages.register(first, [b"a", b"x"], [1, 2, 3, 4, *same])
    pages.register(second, [b"b", b"x"], [5, 6, 7, 8, *same])
    assert pages.match([b"b", b"x"], [5, 6, 7, 8, *same], 8) == ([second[0]], 4)
    assert pages.match([b"a", b"x"], [1, 2, 3, 4, *same], 8) == (first, 8)


def test_two_requests_that_compute_the_same_prefix_at_once_keep_one_copy_and_both_tails():
    pages = PageAllocator(8, PAGE)
    shared = list(range(8))
    tails = [[30, 31, 32, 33], [40, 41, 42, 43]]
    tables = [pages.allocate(3), pages.allocate(3)]
    first, second = (list(t) for t in tables)
    for table, tail in zip(tables, tails, strict=True):
        pages.register(table, keys_of(shared + tail), shared + tail)
    for table in tables:
        pages.free(table)
    assert _hit(pages, shared + tails[0]) == first
    assert _hit(pages, shared + tails[1]) == [*first[:2], second[2]]
    assert pages.stats()[:4] == (8, 4, 4, 0)


def test_a_parent_takes_its_continuations_along_and_they_can_be_registered_again():
    pages = PageAllocator(5, PAGE)
    shared, tail = [0, 1, 2, 3], [4, 5, 6, 7]
    first, second = pages.allocate(1), pages.allocate(2)
    pages.register(first, keys_of(shared), shared)
    pages.register(second, keys_of(shared + tail), shared + tail)  # its tail continues the other's block
    pages.free(first)
    rest = pages.allocate(3)  # gives up the shared block while the second request runs on
    assert pages.stats().evictions == 2
    assert _hit(pages, shared + tail) == []
    pages.register(second, keys_of(shared + tail), shared + tail)
    assert _hit(pages, shared + tail) == second
    pages.free(rest)


def test_blocks_are_registered_as_they_fill_up():
    pages, table = PageAllocator(4, PAGE), []
    tokens = list(range(12))
    pages.ensure(table, 12)
    for length in range(13):
        pages.register(table, keys_of(tokens[:length]), tokens[:length])
        assert _hit(pages, tokens) == table[: length // PAGE]


def test_the_least_recently_used_prefix_goes_first_and_its_last_block_before_its_first():
    pages = PageAllocator(6, PAGE)
    prompts = [[base + i for i in range(8)] for base in (0, 100, 200)]
    blocks = [_known(pages, prompt) for prompt in prompts]
    assert _hit(pages, prompts[0]) == blocks[0]  # used again: now the most recent
    order = []
    for _ in range(6):
        order += pages.allocate(1)
    assert order == blocks[1][::-1] + blocks[2][::-1] + blocks[0][::-1]


def test_giving_up_the_end_of_a_prefix_leaves_its_beginning_known():
    pages = PageAllocator(3, PAGE)
    tokens = list(range(12))
    blocks = _known(pages, tokens)
    for left in (2, 1, 0):
        pages.allocate(1)
        assert _hit(pages, tokens) == blocks[:left]


def test_free_blocks_are_used_before_known_ones_are_given_up():
    pages = PageAllocator(6, PAGE)
    _known(pages, list(range(8)))
    pages.allocate(4)
    assert pages.stats()[:4] == (6, 0, 2, 4)
    assert pages.stats().evictions == 0


def test_matched_blocks_are_safe_from_eviction():
    pages = PageAllocator(3, PAGE)
    tokens = list(range(8))
    blocks = _known(pages, tokens)
    table, _ = pages.match(keys_of(tokens), tokens, 8)
    assert pages.available == 1
    assert pages.allocate(2) is None
    assert pages.allocate(1)[0] not in blocks
    assert table == blocks


def test_clear_forgets_contents_but_not_owners():
    pages = PageAllocator(6, PAGE)
    running = pages.allocate(2)
    pages.register(running, keys_of(list(range(8))), list(range(8)))
    _known(pages, list(range(50, 58)))
    pages.clear()
    assert pages.stats()[:4] == (6, 4, 0, 2)
    assert _hit(pages, list(range(8))) == []
    pages.free(running)
    assert pages.stats().free == 6


def test_misuse_of_register_raises():
    pages = PageAllocator(4, PAGE)
    table = pages.allocate(1)
    with pytest.raises(EngineError, match="2 keys for a table of 1"):
        pages.register(table, [b"a", b"b"], range(8))
    with pytest.raises(EngineError, match="3 of 4 tokens"):
        pages.register(table, [b"a"], [1, 2, 3])
    pages.register(table, [b"a"], [1, 2, 3, 4])
    with pytest.raises(EngineError, match="something else"):
        pages.register(table, [b"c"], [5, 6, 7, 8])
    stale = list(table)
    pages.free(table)
    with pytest.raises(EngineError, match="not in use"):
        pages.register(stale, [b"d"], [5, 6, 7, 8])
