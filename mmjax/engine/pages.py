# SPDX-License-Identifier: Apache-2.0
"""Who owns which KV page, and which pages hold a prefix that another prompt can reuse. Block numbers alone, no arrays.

A block is free, in use (referenced by tables), or cached: unreferenced, but kept because its contents are known.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mmjax.errors import ConfigError, EngineError


class PageStats(NamedTuple):
    """Blocks by state now, and what reuse has brought since the start."""

    num_blocks: int
    free: int
    cached: int
    in_use: int
    lookups: int
    hits: int  # lookups that found at least one block
    reused_tokens: int
    evictions: int  # blocks whose known contents were given up


@dataclass
class _Entry:
    """What a known block holds. Equal keys are not trusted: tokens and parent decide."""

    key: bytes
    tokens: tuple[Hashable, ...]
    parent: int | None  # the block of the prefix before it; None for a first block
    children: set[int] = field(default_factory=set)


class PageAllocator:
    """Hands out blocks of `tokens_per_block` token slots, numbered from 0, to tables: plain lists of block numbers.

    Full blocks whose KV is written can be registered under a chained key (`inputs/kv_key.py`); `match` gives them to
    later prompts that begin alike. A known prefix is a tree: a block is known only while its parent is. Cached blocks
    are given up, least recently used first, when a block is needed and none is free; within one table the last block
    goes first. Blocks obtained from `match` are shared and must not be written; they are whole, so a prompt goes on in
    blocks of its own.

    Args:
      num_blocks: a limit of the host; the device's pool may have more.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int):
        if num_blocks < 1 or tokens_per_block < 1:
            raise ConfigError(f"num_blocks={num_blocks} and tokens_per_block={tokens_per_block} must be at least 1")
        self.num_blocks, self.tokens_per_block = num_blocks, tokens_per_block
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced known blocks, least recently used first
        self._entries: dict[int, _Entry] = {}
        self._by_key: dict[bytes, int] = {}
        self._lookups = self._hits = self._reused_blocks = self._evictions = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of unknown contents with one reference each; None, and no change, if there are not as many."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._forget(next(iter(self._cached)))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def ensure(self, table: list[int], num_tokens: int) -> bool:
        """Extends `table` to hold `num_tokens` tokens; False, and no change, if there are not enough blocks."""
        blocks = self.allocate(max(0, self.blocks_for(num_tokens) - len(table)))
        if blocks is None:
            return False
        table.extend(blocks)
        return True

    def free(self, table: list[int]) -> None:
        """Gives back one reference to each block and empties `table`.

        Raises:
          EngineError: a block has fewer references than this takes; nothing is changed.
        """
        for block, count in Counter(table).items():
            if not (0 <= block < self.num_blocks and self._references[block] >= count):
                raise EngineError(f"block {block} is freed more often than it was taken")
        for block in reversed(table):  # last block first: it is the first to be given up
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._entries:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        table.clear()

    def match(self, keys: Sequence[bytes], tokens: Sequence[Hashable], max_tokens: int) -> tuple[list[int], int]:
        """The longest known prefix, as a new table with a reference to each block, and the tokens it holds.

        Args:
          keys: chained keys of the prompt's full blocks; empty for a prompt that may not share.
          tokens: its key tokens, in which an item stands as its content; compared with those registered.
          max_tokens: at most this many are served. At least the last token of a prompt must be computed, so one fewer
            than its length.
        """
        table: list[int] = []
        for index, key in enumerate(keys[: max(0, max_tokens) // self.tokens_per_block]):
            block = self._by_key.get(key)
            if block is None or not self._holds(block, tokens, index, table[-1] if table else None):
                break
            table.append(block)
        for block in table:
            self._references[block] += 1
            self._cached.pop(block, None)
        self._lookups += 1
        self._hits += bool(table)
        self._reused_blocks += len(table)
        return table, len(table) * self.tokens_per_block

    def undo_match(self, table: list[int]) -> None:
        """Takes back what `match` gave, for a prompt that can't start yet, as if nobody had asked."""
        self._lookups -= 1
        self._hits -= bool(table)
        self._reused_blocks -= len(table)
        self.free(table)

    def register(self, table: Sequence[int], keys: Sequence[bytes], tokens: Sequence[Hashable]) -> None:
        """Makes known what the first `len(keys)` blocks of `table` hold. Their KV must be written, or dispatched.

        Call it with all keys so far whenever more blocks are full. If another request has registered the same contents
        already, that block stays the known one and this one is free again after its last use.

        Raises:
          EngineError: more keys than blocks, or a block that is not in use or holds something else.
        """
        if len(keys) > len(table):
            raise EngineError(f"{len(keys)} keys for a table of {len(table)} blocks")
        parent = None
        for index, key in enumerate(keys):
            block, known = table[index], self._by_key.get(key)
            if known is None:
                self._publish(block, _Entry(key, self._content(tokens, index), parent))
            elif known != block:
                if not self._holds(known, tokens, index, parent):
                    return  # two contents with one key: nothing from here on can be found by key
                block = known
            parent = block

    def clear(self) -> None:
        """Forgets all contents, as after the loss of the device's pages; blocks in use stay in use."""
        for block in list(self._entries):
            if block in self._entries:
                self._forget(block)

    def stats(self) -> PageStats:
        return PageStats(
            num_blocks=self.num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            in_use=self.num_blocks - self.available,
            lookups=self._lookups,
            hits=self._hits,
            reused_tokens=self._reused_blocks * self.tokens_per_block,
            evictions=self._evictions,
        )

    def _content(self, tokens: Sequence[Hashable], index: int) -> tuple[Hashable, ...]:
        content = tuple(tokens[index * self.tokens_per_block : (index + 1) * self.tokens_per_block])
        if len(content) < self.tokens_per_block:
            raise EngineError(
                f"block {index} of a table has a key but {len(content)} of {self.tokens_per_block} tokens"
            )
        return content

    def _holds(self, block: int, tokens: Sequence[Hashable], index: int, parent: int | None) -> bool:
        entry = self._entries[block]
        return entry.parent == parent and entry.tokens == self._content(tokens, index)

    def _publish(self, block: int, entry: _Entry) -> None:
        if self._references[block] == 0 or block in self._entries:
            raise EngineError(f"block {block} is registered while it is not in use or holds something else")
        self._entries[block] = entry
        self._by_key[entry.key] = block
        if entry.parent is not None:
            self._entries[entry.parent].children.add(block)

    def _forget(self, block: int) -> None:
        """Gives up the contents of `block` and of all blocks that continue it, which can't be reached any more."""
        parent = self._entries[block].parent
        if parent is not None:
            self._entries[parent].children.discard(block)
        subtree = [block]
        while subtree:
            block = subtree.pop()
            entry = self._entries.pop(block)
            subtree.extend(entry.children)
            del self._by_key[entry.key]
            self._evictions += 1
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)
