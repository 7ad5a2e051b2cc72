# SPDX-License-Identifier: Apache-2.0
"""Packed segment attention in plain XLA: blocks of queries against blocks of keys, memory linear in the tokens."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.blocks import Softmax, add_keys, empty_softmax, finish, group_heads, ungroup_heads

# Elements of one block of scores (heads x rows x columns); a problem this small takes a single block.
BLOCK_SCORES = 1 << 20


class _Problem(NamedTuple):
    """The arrays every block reads: tokens, segment offsets and each token's segment (S for padding)."""

    q: Float[Array, "P N D"]
    k: Float[Array, "P K D"]
    v: Float[Array, "P K D"]
    cu_seqlens: Int[Array, "S+1"]
    segment: Int[Array, " P"]


def segment_of_token(cu_seqlens: Int[Array, "S+1"], tokens: int) -> Int[Array, " P"]:
    """The segment each of `tokens` packed tokens lies in; tokens past the last offset get S."""
    return (jnp.arange(tokens, dtype=jnp.int32)[:, None] >= cu_seqlens[None, 1:]).sum(1, dtype=jnp.int32)


def block_size(tokens: int, heads: int) -> int:
    """Rows, and columns, of a block: all tokens when they fit in one, else a power of two that keeps blocks small."""
    if heads * tokens * tokens <= 4 * BLOCK_SCORES:
        return tokens
    size = 64
    while heads * (2 * size) ** 2 <= BLOCK_SCORES:
        size *= 2
    return min(size, tokens)


def packed_attention_xla(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    cu_seqlens: Int[Array, "S+1"],
    scale: float,
    causal: bool = False,
) -> Float[Array, "P N D"]:
    """Attention inside each packed segment; tokens past cu_seqlens[-1] give zeros, whatever they hold.

    Softmax and sums are float32. Differentiable in reverse mode, with memory linear in P there too.
    """
    problem = _Problem(q, k, v, cu_seqlens, segment_of_token(cu_seqlens, q.shape[0]))
    size = block_size(q.shape[0], q.shape[1])
    if size == q.shape[0]:
        return _attend_rows(problem, jnp.int32(0), size, scale, causal)
    attend = jax.checkpoint(partial(_attend_rows, size=size, scale=scale, causal=causal), prevent_cse=False)

    def body(out, index):
        # The last block is moved back to end at the last token; the rows it repeats get the same values.
        start = jnp.minimum(index * size, q.shape[0] - size)
        return jax.lax.dynamic_update_slice_in_dim(out, attend(problem, start), start, 0), None

    blocks = jnp.arange(-(-q.shape[0] // size), dtype=jnp.int32)
    return jax.lax.scan(body, jnp.zeros_like(q), blocks)[0]


def _attend_rows(problem: _Problem, start, size: int, scale: float, causal: bool) -> Float[Array, "size N D"]:
    """The output rows [start, start + size)."""
    segments, kv_heads = problem.cu_seqlens.shape[0] - 1, problem.k.shape[1]
    row_segment = _rows(problem.segment, start, size)
    q = jnp.where((row_segment < segments)[:, None, None], _rows(problem.q, start, size), 0)
    q = group_heads(q, kv_heads)
    attend = partial(_add_block, problem, q, row_segment, start, size, scale, causal)
    state = empty_softmax(*q.shape)
    if size == problem.q.shape[0]:
        state = attend(jnp.int32(0), state)
    else:
        first = problem.cu_seqlens[row_segment[0]]
        last = problem.cu_seqlens[jnp.minimum(row_segment[-1] + 1, segments)]
        last = jnp.minimum(last, start + size) if causal else last
        attend = jax.checkpoint(attend, prevent_cse=False)

        def body(state: Softmax, index):
            met = (index * size < last) & (index * size + size > first)
            return jax.lax.cond(met, attend, lambda _, state: state, index, state), None

        state = jax.lax.scan(body, state, jnp.arange(-(-problem.q.shape[0] // size), dtype=jnp.int32))[0]
    out = ungroup_heads(finish(state), size)
    return out.astype(problem.q.dtype)


def _add_block(problem: _Problem, q, row_segment, row_start, size, scale, causal, index, state: Softmax) -> Softmax:
    """`state` after the rows attended to key block `index`."""
    segments = problem.cu_seqlens.shape[0] - 1
    start = jnp.minimum(index * size, problem.k.shape[0] - size)
    column = start + jnp.arange(size, dtype=jnp.int32)
    column_segment = _rows(problem.segment, start, size)
    valid = (column_segment < segments)[:, None, None]
    k = jnp.where(valid, _rows(problem.k, start, size), 0).transpose(1, 0, 2)
    v = jnp.where(valid, _rows(problem.v, start, size), 0).transpose(1, 0, 2)
    mask = (row_segment[:, None] == column_segment) & (column_segment < segments) & (column >= index * size)
    if causal:
        mask &= column <= (row_start + jnp.arange(size, dtype=jnp.int32))[:, None]
    mask = jnp.tile(mask, (q.shape[1] // size, 1))
    return add_keys(state, q, k, v, mask, scale)


def _rows(x: Array, start, size: int) -> Array:
    return x if size == x.shape[0] else jax.lax.dynamic_slice_in_dim(x, start, size)
