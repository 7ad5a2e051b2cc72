# SPDX-License-Identifier: Apache-2.0
"""The vision tower of Qwen2.5-VL: RMSNorm and SwiGLU blocks, attention in windows with a few full blocks.

The published model sorts patches by window before the blocks; here they keep their order and a table of indices names
the patches of each window, which is the same arithmetic.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import gated_mlp, linear
from mmjax.layers.norm import rms_norm
from mmjax.layers.rope import rotary_tables
from mmjax.models.qwen2_5_vl.config import Qwen25VLConfig, Qwen25VLVisionConfig
from mmjax.models.qwen_shared.vision import attention, merge_rows, pixels
from mmjax.models.rotary import axial_pairs
from mmjax.models.vision_inputs import VisionInputs


def vision_spec(cfg: Qwen25VLConfig) -> dict:
    """Shapes of the tower's parameters."""
    v, dtype = cfg.vision, jnp.dtype(cfg.dtype)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    width, joined, depth = v.hidden_size, v.hidden_size * v.merge**2, v.depth
    block = {
        "qkv": leaf(3 * width, width),
        "proj": leaf(width, width),
        "gate_up": leaf(2 * v.mlp_width, width),
        "down": leaf(width, v.mlp_width),
    }
    return {
        "patch_embed": leaf(width, cfg.patch_values),
        "blocks": [dict(block) for _ in range(depth)],
        "vectors": {name: leaf(depth, width) for name in ("norm1", "norm2", "proj_bias", "down_bias")}
        | {"qkv_bias": leaf(depth, 3 * width), "gate_up_bias": leaf(depth, 2 * v.mlp_width)},
        "merger": {
            "norm": leaf(width),
            "fc1": leaf(joined, joined),
            "fc1_bias": leaf(joined),
            "fc2": leaf(v.out_hidden_size, joined),
            "fc2_bias": leaf(v.out_hidden_size),
        },
    }


def block_outputs(
    params: dict, cfg: Qwen25VLConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
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
        full = i in v.full_attention_blocks
        segments = inputs.cu_seqlens if full else inputs.window_index
        outputs.append(_block(block, vectors, outputs[-1], cos, sin, segments, cfg=v, ops=ops, full=full))
    return outputs


def encode(
    params: dict, cfg: Qwen25VLConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R E"]:
    """Embedding rows of packed items, one a merge block of patches; rows of padding hold anything finite.

    Args:
      pixel_table: the normalised value of every byte, per channel.
      ops: static; `packed(q, k, v, cu_seqlens, scale)` attends within segments, `windowed(q, k, v, window_index,
        scale)` within the windows of the table.
    """
    x = block_outputs(params, cfg, inputs, pixel_table, ops)[-1]
    merger = params["merger"]
    return merge_rows(rms_norm(x, merger["norm"], cfg.vision.norm_eps), merger, cfg.vision.merge)


# A jitted function inside the jitted tower is traced and lowered once a kind of block, however many call it.
@partial(jax.jit, static_argnames=("cfg", "ops", "full"))
def _block(
    block: dict,
    vectors: dict,
    x: Float[Array, "P E"],
    cos: Float[Array, "P half_D"],
    sin: Float[Array, "P half_D"],
    segments: Array,
    *,
    cfg: Qwen25VLVisionConfig,
    ops: Any,
    full: bool,
) -> Float[Array, "P E"]:
    def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
        return (ops.packed if full else ops.windowed)(q, k, v, segments, scale)

    normed = rms_norm(x, vectors["norm1"], cfg.norm_eps)
    out = attention(normed, block["qkv"], vectors["qkv_bias"], cos, sin, cfg.num_heads, attend)
    x = x + linear(out, block["proj"], vectors["proj_bias"])
    normed = rms_norm(x, vectors["norm2"], cfg.norm_eps)
    return x + gated_mlp(
        normed, block["gate_up"], block["down"], vectors["gate_up_bias"], vectors["down_bias"], cfg.hidden_act
    )
