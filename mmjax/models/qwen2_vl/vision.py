# SPDX-License-Identifier: Apache-2.0
"""The vision tower of Qwen2-VL: LayerNorm blocks, every patch attends to its whole frame."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from mmjax.layers.linear import ACTIVATIONS, linear
from mmjax.layers.norm import layer_norm
from mmjax.layers.tower_attention import tower_attention
from mmjax.models.qwen2_vl.config import Qwen2VLConfig
from mmjax.models.qwen_shared.config import QwenVisionConfig
from mmjax.models.qwen_shared.vision import merge_rows, run_blocks, tower_spec
from mmjax.models.vision_inputs import VisionInputs


def vision_spec(cfg: Qwen2VLConfig) -> dict:
    """Shapes of the tower's parameters."""
    width, mlp = cfg.vision.hidden_size, cfg.vision.mlp_width
    norms = ("norm1", "norm1_bias", "norm2", "norm2_bias")
    return tower_spec(
        cfg,
        matrices={"fc1": (mlp, width), "fc2": (width, mlp)},
        vectors=dict.fromkeys(norms, width) | {"fc1_bias": mlp, "fc2_bias": width},
        norm_bias=True,
    )


def encode(
    params: dict, cfg: Qwen2VLConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R E"]:
    """Embedding rows of packed items, one a merge block of patches; rows of padding hold anything finite.

    Args:
      pixel_table: the normalised value of every byte, per channel.
      ops: static; `packed(q, k, v, cu_seqlens, scale)` attends within segments.
    """

    def block(_index: int, *arrays: Any) -> Array:
        return _block(*arrays, inputs.cu_seqlens, cfg=cfg.vision, ops=ops)

    x = run_blocks(params, cfg, inputs, pixel_table, block)
    merger = params["merger"]
    return merge_rows(layer_norm(x, merger["norm"], merger["norm_bias"], cfg.vision.norm_eps), merger)


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
    normed = layer_norm(x, vectors["norm1"], vectors["norm1_bias"], cfg.norm_eps)
    out = tower_attention(normed, block["qkv"], vectors["qkv_bias"], cos, sin, cfg.num_heads, ops.packed, cu_seqlens)
    x = x + linear(out, block["proj"], vectors["proj_bias"])
    normed = layer_norm(x, vectors["norm2"], vectors["norm2_bias"], cfg.norm_eps)
    active = ACTIVATIONS[cfg.hidden_act](linear(normed, block["fc1"], vectors["fc1_bias"]))
    return x + linear(active, block["fc2"], vectors["fc2_bias"])
