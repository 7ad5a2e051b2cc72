# SPDX-License-Identifier: Apache-2.0
"""The vision tower of Qwen2-VL: LayerNorm blocks, every patch attends to its whole frame."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import ACTIVATIONS, linear
from mmjax.layers.norm import layer_norm
from mmjax.layers.rope import rotary_tables
from mmjax.models.qwen2_vl.config import Qwen2VLConfig
from mmjax.models.qwen_shared.config import QwenVisionConfig
from mmjax.models.qwen_shared.vision import attention, merge_rows, pixels
from mmjax.models.rotary import axial_pairs
from mmjax.models.vision_inputs import VisionInputs


def vision_spec(cfg: Qwen2VLConfig) -> dict:
    """Shapes of the tower's parameters."""
    v, dtype = cfg.vision, jnp.dtype(cfg.dtype)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    width, joined, depth = v.hidden_size, v.hidden_size * v.merge**2, v.depth
    block = {
        "qkv": leaf(3 * width, width),
        "proj": leaf(width, width),
        "fc1": leaf(v.mlp_width, width),
        "fc2": leaf(width, v.mlp_width),
    }
    names = ("norm1", "norm1_bias", "norm2", "norm2_bias", "proj_bias", "fc2_bias")
    return {
        "patch_embed": leaf(width, cfg.patch_values),
        "blocks": [dict(block) for _ in range(depth)],
        "vectors": {name: leaf(depth, width) for name in names}
        | {"qkv_bias": leaf(depth, 3 * width), "fc1_bias": leaf(depth, v.mlp_width)},
        "merger": {
            "norm": leaf(width),
            "norm_bias": leaf(width),
            "fc1": leaf(joined, joined),
            "fc1_bias": leaf(joined),
            "fc2": leaf(v.out_hidden_size, joined),
            "fc2_bias": leaf(v.out_hidden_size),
        },
    }


def block_outputs(
    params: dict, cfg: Qwen2VLConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> list[Float[Array, "P E"]]:
    """The patch embeddings and the output of every block (depth + 1 arrays)."""
    v = cfg.vision
    x = linear(
        pixels(inputs, pixel_table, v.temporal_patch_size, v.patch_size, jnp.dtype(cfg.dtype)), params["patch_embed"]
    )
    cos, sin = rotary_tables(inputs.positions.T, *axial_pairs(v.head_dim, v.rope_theta))
    outputs = [x]
    for i, block in enumerate(params["blocks"]):
        vectors = {name: stacked[i] for name, stacked in params["vectors"].items()}
        outputs.append(_block(block, vectors, outputs[-1], cos, sin, inputs.cu_seqlens, cfg=v, ops=ops))
    return outputs


def encode(
    params: dict, cfg: Qwen2VLConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R E"]:
    """Embedding rows of packed items, one a merge block of patches; rows of padding hold anything finite.

    Args:
      pixel_table: the normalised value of every byte, per channel.
      ops: static; `packed(q, k, v, cu_seqlens, scale)` attends within segments.
    """
    merger = params["merger"]
    x = block_outputs(params, cfg, inputs, pixel_table, ops)[-1]
    return merge_rows(layer_norm(x, merger["norm"], merger["norm_bias"], cfg.vision.norm_eps), merger, cfg.vision.merge)


# A jitted function inside the jitted tower is traced and lowered once, however many blocks call it.
@partial(jax.jit, static_argnames=("cfg", "ops"))
def _block(
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
    def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
        return ops.packed(q, k, v, cu_seqlens, scale)

    normed = layer_norm(x, vectors["norm1"], vectors["norm1_bias"], cfg.norm_eps)
    out = attention(normed, block["qkv"], vectors["qkv_bias"], cos, sin, cfg.num_heads, attend)
    x = x + linear(out, block["proj"], vectors["proj_bias"])
    normed = layer_norm(x, vectors["norm2"], vectors["norm2_bias"], cfg.norm_eps)
    active = ACTIVATIONS[cfg.hidden_act](linear(normed, block["fc1"], vectors["fc1_bias"]))
    return x + linear(active, block["fc2"], vectors["fc2_bias"])
