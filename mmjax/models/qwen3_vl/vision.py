# SPDX-License-Identifier: Apache-2.0
"""The vision tower of Qwen3-VL: LayerNorm blocks with full attention per frame, learned and rotary positions.

Besides the rows behind the last block it returns deepstack levels: what a few blocks in between give, each through a
merger of its own. A row is [main, level 0, level 1, ...].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from mmjax.layers.linear import linear
from mmjax.layers.norm import layer_norm
from mmjax.layers.pixels import pixel_values
from mmjax.layers.rope import rotary_tables
from mmjax.models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from mmjax.models.qwen3_vl.vision_inputs import Qwen3VLVisionInputs
from mmjax.models.qwen_shared.vision import layer_norm_block, merge_rows
from mmjax.models.rotary import axial_pairs


def vision_spec(cfg: Qwen3VLConfig) -> dict:
    """Shapes of the tower's parameters."""
    v, dtype = cfg.vision, jnp.dtype(cfg.dtype)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def merger(norm_width: int) -> dict:
        joined = v.hidden_size * v.merge**2
        return {
            "norm": leaf(norm_width),
            "norm_bias": leaf(norm_width),
            "fc1": leaf(joined, joined),
            "fc1_bias": leaf(joined),
            "fc2": leaf(v.out_hidden_size, joined),
            "fc2_bias": leaf(v.out_hidden_size),
        }

    width, mlp = v.hidden_size, v.mlp_width
    block = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (mlp, width), "fc2": (width, mlp)}
    vectors = dict.fromkeys(("norm1", "norm1_bias", "norm2", "norm2_bias", "proj_bias", "fc2_bias"), width)
    vectors |= {"qkv_bias": 3 * width, "fc1_bias": mlp}
    return {
        "patch_embed": leaf(width, v.patch_values),
        "patch_embed_bias": leaf(width),
        "position_table": leaf(v.table_side**2, width),
        "blocks": [{name: leaf(*shape) for name, shape in block.items()} for _ in range(v.depth)],
        "vectors": {name: leaf(v.depth, length) for name, length in vectors.items()},
        "merger": merger(width),
        "deepstack": [merger(width * v.merge**2) for _ in v.deepstack_blocks],
    }


def encode(
    params: dict, cfg: Qwen3VLConfig, inputs: Qwen3VLVisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R W"]:
    """Rows of packed items, one a merge block of patches, W = E * (1 + levels); rows of padding hold anything finite.

    Args:
      pixel_table: the normalised value of every byte, per channel.
      ops: static; `packed(q, k, v, cu_seqlens, scale)` attends within segments.
    """
    v = cfg.vision
    values = pixel_values(inputs.patches, inputs.num_patches, pixel_table, jnp.dtype(cfg.dtype))
    x = linear(values, params["patch_embed"], params["patch_embed_bias"])
    x = x + resampled(params["position_table"], inputs.table_index, inputs.table_weight).astype(x.dtype)
    cos, sin = rotary_tables(inputs.positions.T, *axial_pairs(v.head_dim, v.rope_theta))
    levels = []
    for i, matrices in enumerate(params["blocks"]):
        vectors = {name: stacked[i] for name, stacked in params["vectors"].items()}
        x = layer_norm_block(matrices, vectors, x, cos, sin, inputs.cu_seqlens, cfg=v, ops=ops)
        if i in v.deepstack_blocks:
            merger = params["deepstack"][v.deepstack_blocks.index(i)]
            levels.append(_merge(x.reshape(len(x) // v.merge**2, -1), merger, v))
    return jnp.concatenate([_merge(x, params["merger"], v), *levels], axis=-1)


def resampled(
    table: Float[Array, "entries E"], index: Int[Array, "P 4"], weight: Float32[Array, "P 4"]
) -> Float32[Array, "P E"]:
    """The weighted sum of four entries of the table for each patch, in float32."""
    corners = (jnp.take(table, index[:, tap], axis=0, mode="clip").astype(jnp.float32) for tap in range(index.shape[1]))
    return sum(corner * weight[:, tap, None] for tap, corner in enumerate(corners))


def _merge(x: Float[Array, "n norm_width"], merger: dict, cfg: Qwen3VLVisionConfig) -> Float[Array, "R out"]:
    """One embedding row a merge block; what is joined already is normed as a whole."""
    return merge_rows(layer_norm(x, merger["norm"], merger["norm_bias"], cfg.norm_eps), merger)
