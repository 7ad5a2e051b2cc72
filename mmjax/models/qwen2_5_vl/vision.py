# SPDX-License-Identifier: Apache-2.0
"""The vision tower of Qwen2.5-VL: RMSNorm and SwiGLU blocks, attention in windows with a few full blocks.

Patches come sorted by window, so that a window is a packed segment like a frame; rows leave in their natural order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from mmjax.layers.linear import gated_mlp, linear
from mmjax.layers.norm import rms_norm
from mmjax.layers.tower_attention import tower_attention
from mmjax.models.qwen2_5_vl.config import Qwen25VLConfig, Qwen25VLVisionConfig
from mmjax.models.qwen_shared.vision import merge_rows, run_blocks, tower_spec
from mmjax.models.vision_inputs import VisionInputs


def vision_spec(cfg: Qwen25VLConfig) -> dict:
    """Shapes of the tower's parameters."""
    width, mlp = cfg.vision.hidden_size, cfg.vision.mlp_width
    return tower_spec(
        cfg,
        matrices={"gate_up": (2 * mlp, width), "down": (width, mlp)},
        vectors={"norm1": width, "norm2": width, "gate_up_bias": 2 * mlp, "down_bias": width},
        norm_bias=False,
    )


def encode(
    params: dict, cfg: Qwen25VLConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R E"]:
    """Embedding rows of packed items, one a merge block of patches; rows of padding hold anything finite.

    Args:
      pixel_table: the normalised value of every byte, per channel.
      ops: static; `packed(q, k, v, cu_seqlens, scale)` attends within segments, `windowed(q, k, v, window_seqlens,
        scale, capacity)` within windows of at most `capacity` patches.
    """

    def block(index: int, *arrays: Any) -> Array:
        full = index in cfg.vision.full_attention_blocks
        segments = inputs.cu_seqlens if full else inputs.window_seqlens
        return _block(*arrays, segments, cfg=cfg.vision, ops=ops, full=full)

    x = run_blocks(params, cfg, inputs, pixel_table, block)
    merger = params["merger"]
    return merge_rows(rms_norm(x, merger["norm"], cfg.vision.norm_eps), merger)[inputs.row_order]


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
    normed = rms_norm(x, vectors["norm1"], cfg.norm_eps)
    attend = ops.packed if full else partial(ops.windowed, capacity=cfg.window_capacity)
    out = tower_attention(normed, block["qkv"], vectors["qkv_bias"], cos, sin, cfg.num_heads, attend, segments)
    x = x + linear(out, block["proj"], vectors["proj_bias"])
    normed = rms_norm(x, vectors["norm2"], cfg.norm_eps)
    return x + gated_mlp(
        normed, block["gate_up"], block["down"], vectors["gate_up_bias"], vectors["down_bias"], cfg.hidden_act
    )
