# SPDX-License-Identifier: Apache-2.0
"""Attention for training at small fixed shapes: dense masks, and no scatter in any gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.dispatch import VisionOps
from kernels_pallas.window_xla import gather_windows, rows_to_patches, window_table


class Conversation(NamedTuple):
    """Who sees whom: tokens of one example, earlier ones, of the shared beginning (branch 0) or of the same branch."""

    example: Int[Array, "T"]
    branch: Int[Array, "T"]


def masked_attention(
    q: Float[Array, "*B Q N D"],
    k: Float[Array, "*B C K D"],
    v: Float[Array, "*B C K D"],
    mask: Bool[Array, "*B Q C"],
    scale: float,
) -> Float[Array, "*B Q N D"]:
    """Softmax attention with grouped heads; scores in q's dtype, softmax in float32."""
    group = q.shape[-2] // k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], k.shape[-2], group, q.shape[-1]) * scale
    scores = jnp.einsum("...qkgd,...ckd->...kgqc", grouped, k)
    scores = jnp.where(mask[..., None, None, :, :], scores, jnp.asarray(-1e30, scores.dtype))
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("...kgqc,...ckd->...qkgd", weights, v).reshape(q.shape)


def packed(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    cu_seqlens: Int[Array, "S+1"],
    scale: float,
) -> Float[Array, "P N D"]:
    """Attention within segments; padding attends to padding."""
    segment = jnp.searchsorted(cu_seqlens, jnp.arange(len(q)), side="right")
    return masked_attention(q, k, v, segment[:, None] == segment[None, :], scale)


def windowed(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    window_seqlens: Int[Array, "W+1"],
    scale: float,
    capacity: int,
) -> Float[Array, "P N D"]:
    """Attention within windows of at most `capacity` patches."""
    table = window_table(window_seqlens, capacity, len(q))
    mask = jnp.broadcast_to((table < len(q))[:, None, :], (*table.shape, capacity))
    out = masked_attention(*(gather_windows(x, table) for x in (q, k, v)), mask, scale)
    return rows_to_patches(out.reshape(-1, *q.shape[1:]), table, len(q))


def attend(
    q: Float[Array, "T N D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    kv: Any,
    meta: Conversation,
    scale: float,
) -> tuple[Float[Array, "T N D"], Any]:
    """Causal attention over a tree of conversation branches."""
    order = jnp.arange(len(q))
    mask = (
        (order[:, None] >= order[None, :])
        & (meta.example[:, None] == meta.example[None, :])
        & ((meta.branch[None, :] == 0) | (meta.branch[:, None] == meta.branch[None, :]))
    )
    return masked_attention(q, k, v, mask, scale), kv


OPS = VisionOps(packed, windowed)
