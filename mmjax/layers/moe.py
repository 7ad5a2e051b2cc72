# SPDX-License-Identifier: Apache-2.0
"""A mixture of gated MLPs: a router picks a few experts for each token, and only those run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul import group_rows, grouped_gated_matmul, grouped_matmul, spread
from mmjax.layers.linear import linear


class Routing(Protocol):
    """What the mixture needs to know; a static argument.

    Attributes:
      experts_per_token: k, how many experts a token goes through.
      norm_topk: whether the k weights are scaled to sum to one.
    """

    experts_per_token: int
    norm_topk: bool


def route(
    x: Float[Array, "T E"], router: Float[Array, "X E"], moe: Routing
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The experts of each token, best first, and their weights in x's dtype: a softmax over all experts in float32."""
    scores = jax.nn.softmax(linear(x, router).astype(jnp.float32), axis=-1)
    weights, experts = lax.top_k(scores, moe.experts_per_token)
    if moe.norm_topk:
        weights = weights / weights.sum(-1, keepdims=True)
    return experts, weights.astype(x.dtype)


def moe_mlp(x: Float[Array, "T E"], layer: Mapping[str, Array], moe: Routing) -> Float[Array, "T E"]:
    """The weighted sum of down(silu(gate(x)) * up(x)) over each token's experts.

    Weighted results are rounded to x's dtype and summed in float32, best expert first. A row's result depends on that
    row alone.

    Args:
      layer: "router" [X, E]; the experts' matrices as published checkpoints of fused experts store them, inputs before
        outputs: "experts_gate_up" [X, E, 2I], gate first, and "experts_down" [X, I, E].
    """
    tokens, width = x.shape
    experts, weights = route(x, layer["router"], moe)
    groups = group_rows(experts.reshape(-1), len(layer["router"]))
    opened = grouped_gated_matmul(spread(x, groups, moe.experts_per_token), layer["experts_gate_up"], groups)
    down = grouped_matmul(opened, layer["experts_down"], groups)
    results = down[groups.slot].reshape(tokens, moe.experts_per_token, width) * weights[:, :, None]
    return results.sum(1, dtype=jnp.float32).astype(x.dtype)
