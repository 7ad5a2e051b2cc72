# SPDX-License-Identifier: Apache-2.0
"""Attention inside short packed segments, all padded to one length, in plain XLA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.blocks import add_keys, empty_softmax, finish

# Elements of the scores held at a time (windows x heads x C x C).
STEP_SCORES = 1 << 22


def window_attention_xla(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    window_seqlens: Int[Array, "W+1"],
    scale: float,
    capacity: int,
) -> Float[Array, "P N D"]:
    """Attention inside each window, a packed segment of at most `capacity` patches.

    Patches past window_seqlens[-1] give zeros, whatever they hold. Differentiable in reverse mode.
    """
    windows = window_seqlens.shape[0] - 1
    step = max(1, STEP_SCORES // (q.shape[1] * capacity * capacity))
    attend = partial(_attend_windows, q, k, v, scale)
    steps = -(-windows // step)
    table = window_table(window_seqlens, capacity, q.shape[0])
    if steps == 1:
        rows = attend(table)
    else:
        table = jnp.pad(table, ((0, steps * step - windows), (0, 0)), constant_values=q.shape[0])
        rows = jax.lax.map(jax.checkpoint(attend, prevent_cse=False), table.reshape(steps, step, capacity))
    return rows_to_patches(rows.reshape(-1, *q.shape[1:]), table, q.shape[0])


def window_table(window_seqlens: Int[Array, "W+1"], capacity: int, patches: int) -> Int[Array, "W C"]:
    """The patches of each window, then holes: `patches`, which names none."""
    patch = window_seqlens[:-1, None] + jnp.arange(capacity, dtype=jnp.int32)
    return jnp.where(patch < window_seqlens[1:, None], patch, patches)


@jax.custom_vjp
def gather_windows(x: Float[Array, "P N D"], table: Int[Array, "W C"]) -> Float[Array, "W C N D"]:
    """The rows of `x` that the table names; holes read as zeros. Its gradient is `rows_to_patches`, not a scatter."""
    return x.at[table].get(mode="fill", fill_value=0)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows_to_patches(rows: Float[Array, "R N D"], table: Int[Array, "W C"], patches: int) -> Float[Array, "P N D"]:
    """Puts row w * C + c, for every slot (w, c) of the table (R = W * C), at its patch; other patches get zeros.

    Moving wide rows with a gather is faster than scattering them, so the table is inverted first.
    """
    slots = jnp.arange(table.size, dtype=jnp.int32)
    home = jnp.full(patches, rows.shape[0], jnp.int32).at[table.reshape(-1)].set(slots, mode="drop")
    return rows.at[home].get(mode="fill", fill_value=0)


def _gather_forward(x, table):
    return gather_windows(x, table), (table, x[:, :0])


def _gather_gradient(saved, d_rows):
    table, like = saved
    return rows_to_patches(d_rows.reshape(-1, *d_rows.shape[2:]), table, like.shape[0]), None


def _scatter_forward(rows, table, patches):
    return rows_to_patches(rows, table, patches), table


def _scatter_gradient(patches, table, d_out):
    return gather_windows(d_out, table).reshape(-1, *d_out.shape[1:]), None


gather_windows.defvjp(_gather_forward, _gather_gradient)
rows_to_patches.defvjp(_scatter_forward, _scatter_gradient)


def _attend_windows(q, k, v, scale, table: Int[Array, "W C"]) -> Float[Array, "W C N D"]:
    """Dense attention inside each row of `table`."""
    windows, capacity = table.shape
    (patches, heads, width), kv_heads = q.shape, k.shape[1]
    q = gather_windows(q, table).reshape(windows, capacity, kv_heads, heads // kv_heads, width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(windows, kv_heads, -1, width)
    k, v = (gather_windows(x, table).transpose(0, 2, 1, 3) for x in (k, v))
    mask = (table < patches)[:, None, None, :]
    out = finish(add_keys(empty_softmax(*q.shape), q, k, v, mask, scale))
    out = out.reshape(windows, kv_heads, -1, capacity, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(windows, capacity, heads, width).astype(q.dtype)
