# SPDX-License-Identifier: Apache-2.0
"""The slow path that judges the others: plain dense masks, float32, nothing skipped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def dense_attention(
    q: Float[Array, "T N D"],
    k: Float[Array, "C K D"],
    v: Float[Array, "C K D"],
    mask: Bool[Array, "T C"],
    scale: float,
) -> Float[Array, "T N D"]:
    """softmax(q k^T * scale) v over the columns where `mask`; a row with no column gives zeros.

    Columns that no row may see are read as zeros, so they can hold anything.
    """
    seen = mask.any(0)[:, None, None]
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(jnp.where(seen, x, 0).astype(jnp.float32), group, axis=1) for x in (k, v))
    q = jnp.where(mask.any(1)[:, None, None], q, 0).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tnd,cnd->ntc", q, k, precision=highest) * scale
    scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask.any(1)[:, None], scores, 0.0), axis=-1), 0.0)
    return jnp.einsum("ntc,cnd->tnd", weights, v, precision=highest)


def packed_attention_reference(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    cu_seqlens: Int[Array, "S+1"],
    scale: float,
    causal: bool = False,
) -> Float[Array, "P N D"]:
    """Attention inside each packed segment, through one [P, P] mask."""
    index = jnp.arange(q.shape[0])
    segment = (index[:, None] >= cu_seqlens[1:]).sum(1)
    mask = (segment[:, None] == segment) & (index < cu_seqlens[-1])
    if causal:
        mask &= index <= index[:, None]
    return dense_attention(q, k, v, mask, scale).astype(q.dtype)


def window_attention_reference(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    window_seqlens: Int[Array, "W+1"],
    scale: float,
    capacity: int,
) -> Float[Array, "P N D"]:
    """Attention inside each window, through one [P, P] mask, which needs no bound on a window's patches."""
    return packed_attention_reference(q, k, v, window_seqlens, scale)


def causal_attend(
    q: Float[Array, "T N D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], kv_layer: Any, meta: Any, scale: float
) -> tuple[Float[Array, "T N D"], Any]:
    """One whole sequence, causal, no pages: `kv_layer` and `meta` pass through unused."""
    index = jnp.arange(q.shape[0])
    return dense_attention(q, k, v, index <= index[:, None], scale).astype(q.dtype), kv_layer
