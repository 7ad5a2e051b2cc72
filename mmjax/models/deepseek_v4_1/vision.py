# SPDX-License-Identifier: Apache-2.0
"""The vision tower of DeepSeek-V4.1: every patch sees its whole picture; cells of patches become embedding rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import gated_mlp, gelu, linear
from mmjax.layers.pixels import pixel_values
from mmjax.layers.rope import rotary_tables
from mmjax.layers.tower_attention import tower_attention
from mmjax.models.deepseek_v4_1.config import DeepseekV41Config, DeepseekVisionConfig
from mmjax.models.deepseek_v4_1.inputs import DeepseekVisionInputs
from mmjax.models.deepseek_v4_1.norms import wide_rms_norm
from mmjax.models.rotary import axial_pairs


def vision_spec(cfg: DeepseekV41Config) -> dict:
    """Shapes of the parameters of tower, aligner and learned rows, none without a tower.

    Weights of norms are float32 in every model.
    """
    if not cfg.vision.depth:
        return {}
    v, dtype = cfg.vision, jnp.dtype(cfg.dtype)

    def leaf(*shape: int, dtype: jnp.dtype = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    norm = partial(leaf, dtype=jnp.dtype(jnp.float32))
    width, mlp, text = v.hidden_size, v.intermediate_size, cfg.hidden_size
    block = {"qkv": (3 * width, width), "o": (width, width), "gate_up": (2 * mlp, width), "down": (width, mlp)}
    return {
        "patch_embed": leaf(width, v.patch_values),
        "patch_bias": leaf(width),
        "blocks": [{name: leaf(*shape) for name, shape in block.items()} for _ in range(v.depth)],
        "vectors": {
            "norm1": norm(v.depth, width),
            "norm2": norm(v.depth, width),
            "qkv_bias": leaf(v.depth, 3 * width),
            "o_bias": leaf(v.depth, width),
        },
        "norm": norm(width),
        "aligner": {
            "w1": leaf(text, width * v.merge**2),
            "w1_bias": leaf(text),
            "w2": leaf(text, text),
            "w2_bias": leaf(text),
        },
        "start": leaf(text),
        "newline": leaf(text),
        "end": leaf(text),
    }


def encode(
    params: dict, cfg: DeepseekV41Config, inputs: DeepseekVisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R E"]:
    """Embedding rows of packed pictures, learned rows included; rows of padding hold anything finite.

    Args:
      pixel_table: the normalised value of every byte, per channel.
      ops: static; `packed(q, k, v, cu_seqlens, scale)` attends within pictures.
    """
    v = cfg.vision
    values = pixel_values(inputs.patches, inputs.num_patches, pixel_table, jnp.dtype(cfg.dtype))
    x = linear(values, params["patch_embed"], params["patch_bias"])
    cos, sin = rotary_tables(inputs.positions.T, *axial_pairs(v.head_dim, v.rope_theta))
    for i, matrices in enumerate(params["blocks"]):
        vectors = {name: stacked[i] for name, stacked in params["vectors"].items()}
        x = _block(matrices, vectors, x, cos, sin, inputs.cu_seqlens, cfg=v, ops=ops)
    return _rows(params, wide_rms_norm(x, params["norm"], v.norm_eps), inputs)


def _rows(params: dict, normed: Float[Array, "P E"], inputs: DeepseekVisionInputs) -> Float[Array, "R out"]:
    """Joins the patches of each cell, channel-major as an unfolding does, aligns them and sets rows in order."""
    joined = normed.at[inputs.cells].get(mode="fill", fill_value=0).swapaxes(1, 2).reshape(len(inputs.cells), -1)
    aligner = params["aligner"]
    features = linear(gelu(linear(joined, aligner["w1"], aligner["w1_bias"])), aligner["w2"], aligner["w2_bias"])
    learned = jnp.stack([params["start"], params["newline"], params["end"]])
    return jnp.take(jnp.concatenate([features, learned]), inputs.rows, axis=0, mode="clip")


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
    cfg: DeepseekVisionConfig,
    ops: Any,
) -> Float[Array, "P E"]:
    normed = wide_rms_norm(x, vectors["norm1"], cfg.norm_eps)
    out = tower_attention(normed, block["qkv"], vectors["qkv_bias"], cos, sin, cfg.num_heads, ops.packed, cu_seqlens)
    x = x + linear(out, block["o"], vectors["o_bias"])
    return x + gated_mlp(wide_rms_norm(x, vectors["norm2"], cfg.norm_eps), block["gate_up"], block["down"])
