# SPDX-License-Identifier: Apache-2.0
"""Random attention problems of every kind; paged ones come with their answers, from numpy and plain masks."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from kernels_pallas.dispatch import PagedDecode, PagedPrefill

SCALE = 0.37


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def offsets(*lengths: int) -> np.ndarray:
    """cu_seqlens of packed segments of these lengths."""
    return np.cumsum((0, *lengths)).astype(np.int32)


def with_padding(x: np.ndarray, real: int, filler: float) -> np.ndarray:
    """A copy of `x` whose rows from `real` on hold `filler`."""
    x = x.copy()
    x[real:] = filler
    return x


def plain_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False, scale: float = SCALE
) -> np.ndarray:
    """Attention in float64; if causal, q are the last tokens of the sequence, and see everything up to themselves."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("tnd,cnd->ntc", q.astype(np.float64), k) * scale
    if causal:
        scores[:, np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
    return np.einsum("ntc,cnd->tnd", weights / weights.sum(-1, keepdims=True), v)


@dataclass
class Sequences:
    """Some sequences whose keys and values lie in scattered pages of one pool.

    `lengths` counts all tokens of each sequence. Pages that no sequence owns, page tails and table entries past the
    end hold `filler`, or nonsense. Values are float32 that `dtype` can represent.
    """

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    page: int = 4
    num_blocks: int = 32
    table_width: int = 8
    filler: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    q: list[np.ndarray] = field(init=False)
    k: list[np.ndarray] = field(init=False)
    v: list[np.ndarray] = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.q, self.k, self.v = (
            [normal(rng, n, heads, self.width).astype(jnp.dtype(self.dtype)).astype(np.float32) for n in self.lengths]
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        order = iter(rng.permutation(self.num_blocks))
        self.tables = rng.integers(0, 2**31 - 1, (len(self.lengths), self.table_width)).astype(np.int32)
        for s, length in enumerate(self.lengths):
            for i in range(-(-length // self.page)):
                self.tables[s, i] = next(order)

    @property
    def nowhere(self) -> int:
        """A slot past the pool."""
        return self.num_blocks * self.page

    def slot(self, sequence: int, position: int) -> int:
        return self.tables[sequence, position // self.page] * self.page + position % self.page

    def pool(self, stored: list[int]) -> np.ndarray:
        """The pool when the first `stored` tokens of each sequence were written."""
        pool = np.full((self.num_blocks, 2, self.kv_heads, self.page, self.width), self.filler, np.float32)
        for s, count in enumerate(stored):
            for i in range(count):
                block, offset = divmod(self.slot(s, i), self.page)
                pool[block, 0, :, offset], pool[block, 1, :, offset] = self.k[s][i], self.v[s][i]
        return pool

    def prefill(self, prefixes: list[int], chunks: list[int], tokens: int):
        """(q, k, v, pool, meta) of a prefill step; the padding of `tokens` holds `filler`."""
        cu = offsets(*chunks)
        q = np.full((tokens, self.heads, self.width), self.filler, np.float32)
        k = np.full((tokens, self.kv_heads, self.width), self.filler, np.float32)
        v, slots = k.copy(), np.full(tokens, self.nowhere, np.int32)
        for s, (prefix, chunk) in enumerate(zip(prefixes, chunks, strict=True)):
            for packed, whole in ((q, self.q), (k, self.k), (v, self.v)):
                packed[cu[s] : cu[s + 1]] = whole[s][prefix : prefix + chunk]
            slots[cu[s] : cu[s + 1]] = [self.slot(s, prefix + i) for i in range(chunk)]
        return q, k, v, self.pool(prefixes), PagedPrefill(cu, np.array(prefixes, np.int32), self.tables, slots)

    def decode(self):
        """(q, k, v, pool, meta) of the step that adds each sequence's last token; length 0 makes a padding row."""
        filler = np.float32(self.filler)
        q, k, v = (
            np.stack([x[s][-1] if n else np.full(x[0].shape[1:], filler) for s, n in enumerate(self.lengths)])
            for x in (self.q, self.k, self.v)
        )
        slots = [self.slot(s, n - 1) if n else self.nowhere for s, n in enumerate(self.lengths)]
        meta = PagedDecode(np.array(self.lengths, np.int32), self.tables, np.array(slots, np.int32))
        return q, k, v, self.pool([max(n - 1, 0) for n in self.lengths]), meta

    def expected(self, sequence: int, first: int, last: int, scale: float = SCALE) -> np.ndarray:
        """What tokens [first, last) of a sequence see: everything up to themselves."""
        q, k, v = (x[sequence][:last] for x in (self.q, self.k, self.v))
        return plain_attention(q[first:], k, v, True, scale)
