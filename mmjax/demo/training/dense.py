# SPDX-License-Identifier: Apache-2.0
"""Attention for training at small fixed shapes: dense masks, and gathers whose gradients are gathers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.dispatch import VisionOps
from kernels_pallas.window_xla import gather_windows, rows_to_patches


class Conversation(NamedTuple):
    """Who sees whom: tokens of one example, earlier ones, of the shared beginning (branch 0) or of the same branch."""

    example: Int[Array, "T"]
    branch: Int[Array, "T"]


@jax.custom_vjp
def take_rows(x: Float[Array, "R N D"], table: Int[Array, "W C"]) -> Float[Array, "W C N D"]:
    """x[table], zeros outside. Every row appears once at most, so that the gradient is a gather too."""
    return gather_windows(x, table)


def _take_fwd(x: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return gather_windows(x, table), (table, x[:, :0])


def _take_bwd(saved: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    table, like = saved
    return rows_to_patches(grad.reshape(-1, *grad.shape[2:]), table, len(like)), None


take_rows.defvjp(_take_fwd, _take_bwd)


@jax.custom_vjp
def put_rows(rows: Float[Array, "W C N D"], table: Int[Array, "W C"], like: Float[Array, "R *rest"]) -> Array:
    """The inverse of `take_rows`: [R, N, D], zeros where the table names no row. `like` gives R alone."""
    return rows_to_patches(rows.reshape(-1, *rows.shape[2:]), table, len(like))


def _put_fwd(rows: Array, table: Array, like: Array) -> tuple[Array, tuple[Array, Array]]:
    return put_rows(rows, table, like), (table, like)


def _put_bwd(saved: tuple[Array, Array], grad: Array) -> tuple[Array, None, Array]:
    table, like = saved
    return gather_windows(grad, table), None, jnp.zeros_like(like)


put_rows.defvjp(_put_fwd, _put_bwd)


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


def packed(q: Array, k: Array, v: Array, cu_seqlens: Int[Array, "S+1"], scale: float) -> Float[Array, "P N D"]:
    """Attention within segments; padding attends to padding."""
    segment = jnp.searchsorted(cu_seqlens, jnp.arange(len(q)), side="right")
    return masked_attention(q, k, v, segment[:, None] == segment[None, :], scale)


def windowed(q: Array, k: Array, v: Array, window_index: Int[Array, "W C"], scale: float) -> Float[Array, "P N D"]:
    """Attention within the windows of the table."""
    mask = jnp.broadcast_to((window_index < len(q))[:, None, :], (*window_index.shape, window_index.shape[1]))
    out = masked_attention(*(take_rows(x, window_index) for x in (q, k, v)), mask, scale)
    return put_rows(out, window_index, q)


def attend(q: Array, k: Array, v: Array, kv: Any, meta: Conversation, scale: float) -> tuple[Array, Any]:
    """Causal attention over a tree of conversation branches."""
    order = jnp.arange(len(q))
    mask = (
        (order[:, None] >= order[None, :])
        & (meta.example[:, None] == meta.example[None, :])
        & ((meta.branch[None, :] == 0) | (meta.branch[:, None] == meta.branch[None, :]))
    )
    return masked_attention(q, k, v, mask, scale), kv


OPS = VisionOps(packed, windowed)
