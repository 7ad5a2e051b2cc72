# SPDX-License-Identifier: Apache-2.0
"""The experts of the DeepSeek-V4 decoder: routed by token id or by score, with one that every token takes."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul import group_rows, grouped_matmul, spread
from mmjax.layers.fusion import StepTokens
from mmjax.layers.linear import linear, silu
from mmjax.models.deepseek_v4_1.text_config import HASH, DeepseekTextConfig

_SCORES = {
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}
_LEAST_SUM = 1e-20


def mixture(
    x: Float[Array, "T E"], layer: Mapping[str, Array], router: str, tokens: StepTokens, t: DeepseekTextConfig
) -> Float[Array, "T E"]:
    """The weighted sum over each token's experts, and the shared expert."""
    experts, weights = _route(x, layer, router, tokens, t)
    groups = group_rows(experts.reshape(-1), t.num_experts)
    gate_up = grouped_matmul(spread(x, groups, t.experts_per_token), layer["experts_gate_up"], groups)
    out = grouped_matmul(_clamped_product(gate_up, t), layer["experts_down"], groups)
    out = out[groups.slot].reshape(-1, t.experts_per_token, x.shape[1]) * weights[:, :, None].astype(x.dtype)
    shared = linear(_clamped_product(linear(x, layer["shared_gate_up"]), t), layer["shared_down"])
    return out.sum(1, dtype=jnp.float32).astype(x.dtype) + shared


def _route(
    x: Float[Array, "T E"], layer: Mapping[str, Array], router: str, tokens: StepTokens, t: DeepseekTextConfig
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Experts and weights of each token. A bias decides who is chosen and not how much it counts."""
    scores = _SCORES[t.score](linear(x, layer["router"], out_dtype=jnp.float32))
    if router == HASH:
        experts = jnp.take(layer["expert_of_id"], tokens.ids, axis=0, mode="clip")
    else:
        bias = layer["router_bias"]
        if t.vision_bias:
            bias = jnp.where(tokens.is_row[:, None], layer["vision_bias"], bias)
        experts = lax.top_k(scores + bias, t.experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    return experts, weights / (weights.sum(-1, keepdims=True) + _LEAST_SUM) * t.routed_scale


def _clamped_product(gate_up: Float[Array, "rows two_I"], t: DeepseekTextConfig) -> Float[Array, "rows I"]:
    """silu(gate) * up with the gate, the first half, bounded above and the other on both sides."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    limit = t.swiglu_limit
    return silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
