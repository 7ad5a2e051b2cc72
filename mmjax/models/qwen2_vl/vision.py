# SPDX-License-Identifier: Apache-2.0
"""The vision tower of Qwen2-VL: LayerNorm blocks, every patch attends to its whole frame."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from mmjax.layers.norm import layer_norm
from mmjax.models.qwen2_vl.config import Qwen2VLConfig
from mmjax.models.qwen_shared.vision import layer_norm_block, merge_rows, run_blocks, tower_spec
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
        return layer_norm_block(*arrays, inputs.cu_seqlens, cfg=cfg.vision, ops=ops)

    x = run_blocks(params, cfg, inputs, pixel_table, block)
    merger = params["merger"]
    return merge_rows(layer_norm(x, merger["norm"], merger["norm_bias"], cfg.vision.norm_eps), merger)
