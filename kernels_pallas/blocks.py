# SPDX-License-Identifier: Apache-2.0
"""Attention of one block of queries on one block of keys, with a running softmax that blocks can be added to."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# A finite stand-in for minus infinity: the difference of two of them is 0, not NaN.
NEVER = -1e30


class Softmax(NamedTuple):
    """A softmax-weighted sum in progress, float32: row maximum, sum of exponentials and weighted sum of values."""

    peak: Float[Array, "*batch rows"]
    total: Float[Array, "*batch rows"]
    values: Float[Array, "*batch rows D"]


def empty_softmax(*shape: int) -> Softmax:
    """The state before any key was seen; `shape` is (*batch, rows, D)."""
    return Softmax(
        jnp.full(shape[:-1], NEVER, jnp.float32), jnp.zeros(shape[:-1], jnp.float32), jnp.zeros(shape, jnp.float32)
    )


def add_keys(
    state: Softmax,
    q: Float[Array, "*batch rows D"],
    k: Float[Array, "*batch cols D"],
    v: Float[Array, "*batch cols D"],
    mask: Bool[Array, "..."],
    scale: float,
) -> Softmax:
    """`state` after the rows of `q` also attended to `k` and `v` where `mask` (broadcasts to [*batch, rows, cols]).

    Masked columns of `v` must be finite: their weight is 0, and 0 times NaN is NaN. The peak only steadies the
    exponentials and cancels in the result, so no gradient flows through it.
    """
    scores = jnp.einsum("...rd,...cd->...rc", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask, scores, NEVER)
    peak = jax.lax.stop_gradient(jnp.maximum(state.peak, scores.max(-1)))
    weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
    fade = jnp.exp(jax.lax.stop_gradient(state.peak) - peak)
    summed = jnp.einsum("...rc,...cd->...rd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Softmax(peak, state.total * fade + weights.sum(-1), state.values * fade[..., None] + summed)


def finish(state: Softmax) -> Float[Array, "*batch rows D"]:
    """The weighted mean of the values; rows that saw no key give zeros."""
    return state.values / jnp.where(state.total > 0, state.total, 1.0)[..., None]


def log_sum_exp(state: Softmax) -> Float[Array, "*batch rows"]:
    """The logarithm of the sum of exponentials of each row's scores; `NEVER` for rows that saw no key."""
    return state.peak + jnp.log(jnp.where(state.total > 0, state.total, 1.0))


def group_heads(q: Float[Array, "rows N D"], kv_heads: int) -> Float[Array, "K group*rows D"]:
    """Query heads that share a key head become extra rows of it: head n uses key head n // (N / K)."""
    rows, heads, width = q.shape
    return q.reshape(rows, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)


def ungroup_heads(out: Float[Array, "K group*rows D"], rows: int) -> Float[Array, "rows N D"]:
    """Inverse of `group_heads`."""
    kv_heads, _, width = out.shape
    return out.reshape(kv_heads, -1, rows, width).transpose(2, 0, 1, 3).reshape(rows, -1, width)
