# SPDX-License-Identifier: Apache-2.0
"""Residual streams (manifold-constrained hyper-connections): how a layer reads several streams and writes them back."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import linear
from mmjax.models.deepseek_v4_1.norms import unweighted_rms_norm
from mmjax.models.deepseek_v4_1.text_config import DeepseekTextConfig


class Mix(NamedTuple):
    """How a branch of a layer uses the streams of each token; float32.

    Attributes:
      write: what of the branch's output goes to each stream.
      carry: what of each old stream goes to each new one, [from, to]; its rows and columns sum to one.
    """

    write: Float[Array, "T streams"]
    carry: Float[Array, "T streams streams"]


def read_streams(
    streams: Float[Array, "T streams E"],
    matrix: Float[Array, "outputs streams*E"],
    base: Float[Array, "outputs"],
    scale: Float[Array, "3"],
    t: DeepseekTextConfig,
) -> tuple[Float[Array, "T E"], Mix]:
    """The input of a branch, a weighted sum of the streams, and how its output is to be written back.

    Args:
      matrix, base, scale: give 2 n + n * n values a token: weights of reading, of writing and of carrying.
    """
    n = t.streams
    values = linear(_flat(streams, t), matrix)
    read, write, carry = jnp.split(values, (n, 2 * n), axis=-1)
    read_base, write_base, carry_base = jnp.split(base, (n, 2 * n))
    read = jax.nn.sigmoid(read * scale[0] + read_base) + t.stream_eps
    write = 2 * jax.nn.sigmoid(write * scale[1] + write_base)
    carry = (carry * scale[2] + carry_base).reshape(-1, n, n)
    return _weighted(streams, read), Mix(write, _doubly_stochastic(carry, t))


def write_streams(
    streams: Float[Array, "T streams E"], out: Float[Array, "T E"], mix: Mix
) -> Float[Array, "T streams E"]:
    """The streams behind a branch: its output spread over them, and the old ones mixed."""
    write, carry = (part.astype(streams.dtype) for part in mix)
    return write[:, :, None] * out[:, None, :] + jnp.einsum("tij,tie->tje", carry, streams)


def join_streams(streams: Float[Array, "T streams E"], head: dict, t: DeepseekTextConfig) -> Float[Array, "T E"]:
    """One hidden state of each token behind the last layer."""
    values = linear(_flat(streams, t), head["matrix"])
    return _weighted(streams, jax.nn.sigmoid(values * head["scale"] + head["base"]) + t.stream_eps)


def _flat(streams: Float[Array, "T streams E"], t: DeepseekTextConfig) -> Float[Array, "T streams*E"]:
    return unweighted_rms_norm(streams.reshape(len(streams), -1), t.rms_norm_eps)


def _weighted(streams: Float[Array, "T streams E"], weights: Float[Array, "T streams"]) -> Float[Array, "T E"]:
    return (weights[:, :, None] * streams).sum(1).astype(streams.dtype)


def _doubly_stochastic(logits: Float[Array, "T n n"], t: DeepseekTextConfig) -> Float[Array, "T n n"]:
    """Rows and columns scaled in turn until both sum to about one (Sinkhorn and Knopp), columns last."""
    eps = t.stream_eps
    carry = jax.nn.softmax(logits, axis=-1) + eps
    carry = carry / (carry.sum(-2, keepdims=True) + eps)
    for _ in range(t.sinkhorn_steps - 1):
        carry = carry / (carry.sum(-1, keepdims=True) + eps)
        carry = carry / (carry.sum(-2, keepdims=True) + eps)
    return carry
