# SPDX-License-Identifier: Apache-2.0
"""Packed segment attention in plain XLA: blocks of queries against blocks of keys, memory linear in the tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.blocks import add_keys, empty_softmax, finish, group_heads, log_sum_exp, ungroup_heads

# Elements of one block of scores (heads x rows x columns): 4 MiB of float32, which stays near the cores' caches.
BLOCK_SCORES = 1 << 20


class _Problem(NamedTuple):
    """What every block reads: tokens, segment offsets, each token's segment (S for padding), and the block size."""

    q: Float[Array, "P N D"]
    k: Float[Array, "P K D"]
    v: Float[Array, "P K D"]
    cu_seqlens: Int[Array, "S+1"]
    segment: Int[Array, " P"]
    size: int
    causal: bool

    @property
    def blocks(self) -> int:
        return -(-self.q.shape[0] // self.size)

    def start(self, index):
        """First token of block `index`; the last block is moved back to end at the last token."""
        return jnp.minimum(index * self.size, self.q.shape[0] - self.size)

    def slice(self, x: Array, index) -> Array:
        """Block `index` of an array over tokens."""
        return x if self.blocks == 1 else jax.lax.dynamic_slice_in_dim(x, self.start(index), self.size)

    def clean(self, x: Array, index) -> Array:
        """Block `index` of an array over tokens, with zeros at padding."""
        real = self.slice(self.segment, index) < self.cu_seqlens.shape[0] - 1
        return jnp.where(real[:, None, None], self.slice(x, index), 0)


def segment_of_token(cu_seqlens: Int[Array, "S+1"], tokens: int) -> Int[Array, " P"]:
    """The segment each of `tokens` packed tokens lies in; tokens past the last offset get S."""
    return (jnp.arange(tokens, dtype=jnp.int32)[:, None] >= cu_seqlens[None, 1:]).sum(1, dtype=jnp.int32)


def block_size(tokens: int, heads: int) -> int:
    """Rows, and columns, of a block: all tokens when they fit in one, else equal shares rounded up to 16."""
    largest = max(64, math.isqrt(BLOCK_SCORES // heads))
    blocks = -(-tokens // largest)
    return tokens if blocks == 1 else -(-tokens // (16 * blocks)) * 16


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def packed_attention_xla(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    cu_seqlens: Int[Array, "S+1"],
    scale: float,
    causal: bool = False,
) -> Float[Array, "P N D"]:
    """Attention inside each packed segment; tokens past cu_seqlens[-1] give zeros, whatever they hold.

    Softmax and sums are float32. Blocks whose segments do not meet are skipped. Differentiable in reverse mode, with
    memory linear in P there too: weights are computed again from the log-sum-exp of each row (FlashAttention-2,
    https://arxiv.org/abs/2307.08691, section 3.1).
    """
    return _forward(q, k, v, cu_seqlens, scale, causal)[0]


def _problem(q, k, v, cu_seqlens, causal) -> _Problem:
    segment = segment_of_token(cu_seqlens, q.shape[0])
    return _Problem(q, k, v, cu_seqlens, segment, block_size(*q.shape[:2]), causal)


def _forward(q, k, v, cu_seqlens, scale, causal) -> tuple[Float[Array, "P N D"], Float[Array, "P N"]]:
    """The output, and the log-sum-exp of each row's scores."""
    problem = _problem(q, k, v, cu_seqlens, causal)
    size, kv_heads = problem.size, k.shape[1]

    def rows(index, carry):
        out, lse = carry
        grouped = group_heads(problem.clean(q, index), kv_heads)

        def columns(column_index, state):
            keys, values = _key_block(problem, column_index)
            return add_keys(state, grouped, keys, values, _mask(problem, index, column_index, q.shape[1]), scale)

        state = _over_key_blocks(problem, index, columns, empty_softmax(*grouped.shape))
        block = ungroup_heads(finish(state), size).astype(q.dtype)
        block_lse = ungroup_heads(log_sum_exp(state)[..., None], size)[..., 0]
        start = problem.start(index)
        # Rows that the last block repeats get the same values again.
        return tuple(jax.lax.dynamic_update_slice_in_dim(*pair, start, 0) for pair in ((out, block), (lse, block_lse)))

    return _loop(problem.blocks, rows, (jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32)))


def _save_for_gradient(q, k, v, cu_seqlens, scale, causal):
    out, lse = _forward(q, k, v, cu_seqlens, scale, causal)
    return out, (q, k, v, cu_seqlens, out, lse)


def _gradient(scale, causal, saved, d_out):
    """Gradients of q, k and v from the output's; block by block, as the forward pass."""
    q, k, v, cu_seqlens, out, lse = saved
    problem = _problem(q, k, v, cu_seqlens, causal)
    kv_heads, heads = k.shape[1], q.shape[1]

    def rows(index, gradients):
        grouped = group_heads(problem.clean(q, index), kv_heads)
        # Rows that the last block repeats were counted by the block before it.
        repeated = problem.start(index) + jnp.arange(problem.size) < index * problem.size
        d_rows = group_heads(jnp.where(repeated[:, None, None], 0, problem.clean(d_out, index)), kv_heads)
        row_lse = group_heads(problem.slice(lse, index)[..., None], kv_heads)
        dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
        drift = (d_rows.astype(jnp.float32) * group_heads(problem.slice(out, index), kv_heads)).sum(-1, keepdims=True)

        def columns(column_index, gradients):
            d_q, d_k, d_v = gradients
            keys, values = _key_block(problem, column_index)
            mask = _mask(problem, index, column_index, heads)
            weights = jnp.where(mask, jnp.exp(dot("krd,kcd->krc", grouped, keys) * scale - row_lse), 0.0)
            d_scores = weights * (dot("krd,kcd->krc", d_rows, values) - drift) * scale
            weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
            d_q = _add_block(problem, d_q, index, ungroup_heads(dot("krc,kcd->krd", d_scores, keys), problem.size))
            d_k = _add_block(problem, d_k, column_index, dot("krc,krd->ckd", d_scores, grouped))
            d_v = _add_block(problem, d_v, column_index, dot("krc,krd->ckd", weights, d_rows))
            return d_q, d_k, d_v

        return _over_key_blocks(problem, index, columns, gradients)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    d_q, d_k, d_v = _loop(problem.blocks, rows, zeros)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


packed_attention_xla.defvjp(_save_for_gradient, _gradient)


def _key_block(problem: _Problem, index) -> tuple[Float[Array, "K size D"], Float[Array, "K size D"]]:
    """Keys and values of block `index`, zeros at padding."""
    return problem.clean(problem.k, index).transpose(1, 0, 2), problem.clean(problem.v, index).transpose(1, 0, 2)


def _mask(problem: _Problem, row_index, column_index, heads: int) -> Bool[Array, "group*size size"]:
    """Which columns each row may see; columns that a moved last block repeats are left out."""
    offset = jnp.arange(problem.size, dtype=jnp.int32)
    row, column = problem.start(row_index) + offset, problem.start(column_index) + offset
    row_segment, column_segment = (
        problem.slice(problem.segment, row_index),
        problem.slice(problem.segment, column_index),
    )
    mask = (row_segment[:, None] == column_segment) & (column_segment < problem.cu_seqlens.shape[0] - 1)
    mask &= column >= column_index * problem.size
    if problem.causal:
        mask &= column <= row[:, None]
    return jnp.tile(mask, (heads // problem.k.shape[1], 1))


def _over_key_blocks(problem: _Problem, index, body, state):
    """Runs `body(key block, state)` over the key blocks that row block `index` may see."""
    if problem.blocks == 1:
        return body(jnp.int32(0), state)
    row_segment, segments = problem.slice(problem.segment, index), problem.cu_seqlens.shape[0] - 1
    first = problem.cu_seqlens[row_segment[0]]
    last = problem.cu_seqlens[jnp.minimum(row_segment[-1] + 1, segments)]
    if problem.causal:
        last = jnp.minimum(last, problem.start(index) + problem.size)
    return jax.lax.fori_loop(first // problem.size, -(-last // problem.size), body, state)


def _loop(blocks: int, body, state):
    return body(jnp.int32(0), state) if blocks == 1 else jax.lax.fori_loop(0, blocks, body, state)


def _add_block(problem: _Problem, total: Float[Array, "P H D"], index, block: Float[Array, "size H D"]):
    """`total` with `block` added at block `index`."""
    if problem.blocks == 1:
        return total + block
    return jax.lax.dynamic_update_slice_in_dim(total, problem.slice(total, index) + block, problem.start(index), 0)
