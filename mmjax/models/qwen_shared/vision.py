# SPDX-License-Identifier: Apache-2.0
"""What the Qwen vision towers share: all around their blocks, and the block of two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import ACTIVATIONS, gelu, linear
from mmjax.layers.norm import layer_norm
from mmjax.layers.pixels import pixel_values
from mmjax.layers.rope import rotary_tables
from mmjax.layers.tower_attention import tower_attention
from mmjax.models.qwen_shared.config import QwenConfig, QwenVisionConfig
from mmjax.models.rotary import axial_pairs
from mmjax.models.vision_inputs import VisionInputs


def tower_spec(
    cfg: QwenConfig, *, matrices: Mapping[str, tuple[int, int]], vectors: Mapping[str, int], norm_bias: bool
) -> dict:
    """Shapes of a tower's parameters.

    Args:
      matrices: of every block, besides those of its attention.
      vectors: of every block, besides the biases of its attention; stacked over blocks.
      norm_bias: whether the merger's norm has a bias.
    """
    v, dtype = cfg.vision, jnp.dtype(cfg.dtype)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    width, joined = v.hidden_size, v.hidden_size * v.merge**2
    block = {"qkv": (3 * width, width), "proj": (width, width), **matrices}
    merger = {
        "norm": leaf(width),
        "fc1": leaf(joined, joined),
        "fc1_bias": leaf(joined),
        "fc2": leaf(v.out_hidden_size, joined),
        "fc2_bias": leaf(v.out_hidden_size),
    }
    return {
        "patch_embed": leaf(width, cfg.patch_values),
        "blocks": [{name: leaf(*shape) for name, shape in block.items()} for _ in range(v.depth)],
        "vectors": {
            name: leaf(v.depth, length)
            for name, length in {"qkv_bias": 3 * width, "proj_bias": width, **vectors}.items()
        },
        "merger": merger | ({"norm_bias": leaf(width)} if norm_bias else {}),
    }


def run_blocks(
    params: dict,
    cfg: QwenConfig,
    inputs: VisionInputs,
    pixel_table: Float[Array, "C 256"],
    block: Callable[..., Float[Array, "P E"]],
) -> Float[Array, "P E"]:
    """Patch embeddings, sent through every block.

    Args:
      pixel_table: the normalised value of every byte, per channel.
      block: (index, its matrices, its vectors, x [P, E], cos and sin [P, D/2]) -> x.
    """
    v = cfg.vision
    values = pixel_values(inputs.patches, inputs.num_patches, pixel_table, jnp.dtype(cfg.dtype))
    x = linear(values, params["patch_embed"])
    cos, sin = rotary_tables(inputs.positions.T, *axial_pairs(v.head_dim, v.rope_theta))
    for i, matrices in enumerate(params["blocks"]):
        vectors = {name: stacked[i] for name, stacked in params["vectors"].items()}
        x = block(i, matrices, vectors, x, cos, sin)
    return x


def merge_rows(normed: Float[Array, "n width"], merger: dict) -> Float[Array, "R out"]:
    """Joins the patches of each merge block, unless they come joined, and maps them to one embedding row."""
    joined = normed.reshape(-1, merger["fc1"].shape[1])
    return linear(gelu(linear(joined, merger["fc1"], merger["fc1_bias"])), merger["fc2"], merger["fc2_bias"])


# A jitted function inside the jitted tower is traced and lowered once, however many blocks call it.
@partial(jax.jit, static_argnames=("cfg", "ops"))
def layer_norm_block(
    block: dict,
    vectors: dict,
    x: Float[Array, "P E"],
    cos: Float[Array, "P half_D"],
    sin: Float[Array, "P half_D"],
    cu_seqlens: Array,
    *,
    cfg: QwenVisionConfig,
    ops: Any,
) -> Float[Array, "P E"]:
    """A block with layer norms and a plain MLP, as in Qwen2-VL and Qwen3-VL; attention within segments.

    Args:
      block, vectors: the block's matrices, and its biases and norms.
      ops: static, see `encode` of the towers.
    """
    normed = layer_norm(x, vectors["norm1"], vectors["norm1_bias"], cfg.norm_eps)
    out = tower_attention(normed, block["qkv"], vectors["qkv_bias"], cos, sin, cfg.num_heads, ops.packed, cu_seqlens)
    x = x + linear(out, block["proj"], vectors["proj_bias"])
    normed = layer_norm(x, vectors["norm2"], vectors["norm2_bias"], cfg.norm_eps)
    active = ACTIVATIONS[cfg.hidden_act](linear(normed, block["fc1"], vectors["fc1_bias"]))
    return x + linear(active, block["fc2"], vectors["fc2_bias"])
