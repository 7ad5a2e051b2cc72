# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights in the checkpoint's [out, in] layout, and the activations between them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "*dims in_width"],
    weight: Float[Array, "out_width in_width"],
    bias: Float[Array, "out_width"] | None = None,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "*dims out_width"]:
    """x @ weight.T + bias. The result has x's dtype, or `out_dtype` straight from the float32 accumulator."""
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    return y if bias is None else y + bias


def silu(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """x * sigmoid(x), in float32."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def gelu(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """x * Phi(x) with the exact error function, in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def gelu_tanh(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """x * Phi(x) with Phi approximated through tanh, in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def quick_gelu(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """x * sigmoid(1.702 x), in x's dtype."""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}


def gated_mlp(
    x: Float[Array, "T E"],
    gate_up: Float[Array, "two_width E"],
    down: Float[Array, "E width"],
    gate_up_bias: Float[Array, "two_width"] | None = None,
    down_bias: Float[Array, "E"] | None = None,
    activation: str = "silu",
) -> Float[Array, "T E"]:
    """down(activation(gate(x)) * up(x)), with gate and up joined along their outputs, gate first."""
    gate, up = jnp.split(linear(x, gate_up, gate_up_bias), 2, axis=-1)
    return linear(ACTIVATIONS[activation](gate) * up, down, down_bias)
