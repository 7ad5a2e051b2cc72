# SPDX-License-Identifier: Apache-2.0
"""Entries: what a layer keeps of the far past, one weighted sum for each few or many tokens, and who may see which.

An entry follows from the states of its tokens alone, and pages hold those: it is worked out when its last token comes
and kept in that token's state, the same whatever chunks, prefixes and preemptions brought the others there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mmjax.models.deepseek_v4_1.norms import wide_rms_norm
from mmjax.models.deepseek_v4_1.rope import turn


class Gated(NamedTuple):
    """What the tokens of entries bring, and what weighs them within an entry."""

    values: Float[Array, "C tokens width"]
    gates: Float[Array, "C tokens width"]


def heavy_entries(
    tokens: Gated, bias: Float[Array, "rate D"], norm: Float[Array, "D"], cos: Array, sin: Array, eps: float
) -> Float[Array, "C D"]:
    """One entry for each `rate` tokens. cos, sin: rotary tables of the entries' first tokens, [C, pairs]."""
    return _entries(tokens.values, tokens.gates + bias, norm, cos, sin, eps)


def sparse_entries(
    tokens: Gated,
    is_first: Bool[Array, "C"],
    bias: Float[Array, "rate two_D"],
    norm: Float[Array, "D"],
    cos: Array,
    sin: Array,
    eps: float,
) -> Float[Array, "C D"]:
    """One entry for each `rate` tokens and the `rate` before, which bring the first half of their values.

    Args:
      tokens: all 2 * rate of them, the earlier ones first.
      is_first: entries before which there is no token.
    """

    def joined(both: Float[Array, "C two_rate two_D"], bias: Array | int) -> Float[Array, "C two_rate D"]:
        before, within = (part + bias for part in jnp.split(both, 2, axis=1))
        half = both.shape[-1] // 2
        return jnp.concatenate([before[..., :half], within[..., half:]], axis=1)

    gates = joined(tokens.gates, bias)
    is_missing = is_first[:, None] & (jnp.arange(gates.shape[1]) < len(bias))
    gates = jnp.where(is_missing[..., None], -jnp.inf, gates)
    return _entries(joined(tokens.values, 0), gates, norm, cos, sin, eps)


def _entries(values: Array, gates: Array, norm: Array, cos: Array, sin: Array, eps: float) -> Float[Array, "C D"]:
    weights = jax.nn.softmax(gates.astype(jnp.float32), axis=1)
    return turn(wide_rms_norm((values * weights).sum(1), norm, eps).astype(values.dtype), cos, sin)


def closed(position: Int[Array, "R"], count: int, rate: int) -> Bool[Array, "R C"]:
    """Which of `count` entries have all their tokens at or before each position."""
    return jnp.arange(count, dtype=jnp.int32) < ((position + 1) // rate)[:, None]


def picked(
    queries: Float[Array, "R heads d"],
    head_weights: Float[Array, "R heads"],
    keys: Float[Array, "C d"],
    allowed: Bool[Array, "R C"],
    topk: int,
) -> Bool[Array, "R C"]:
    """The at most `topk` allowed entries of each row that score best: heads' positive products, weighed and summed."""
    heads, dim = queries.shape[1:]
    products = jnp.einsum("rhd,cd->rhc", queries, keys, preferred_element_type=jnp.float32)
    scores = jnp.einsum("rhc,rh->rc", jax.nn.relu(products) * dim**-0.5, head_weights.astype(jnp.float32) * heads**-0.5)
    if topk >= len(keys):
        return allowed
    best = lax.top_k(jnp.where(allowed, scores, -jnp.inf), topk)[1]
    row = jnp.arange(len(best), dtype=jnp.int32)[:, None]
    return jnp.zeros(allowed.shape, bool).at[row, best].set(True) & allowed
