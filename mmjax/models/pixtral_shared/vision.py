# SPDX-License-Identifier: Apache-2.0
"""The Pixtral tower, with its projector: RMSNorm and gated MLPs, no biases, full attention within each picture."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import gated_mlp, gelu, linear
from mmjax.layers.norm import rms_norm
from mmjax.layers.pixels import pixel_values
from mmjax.layers.rope import rotary_tables
from mmjax.layers.tower_attention import tower_attention
from mmjax.models.pixtral_shared.config import PixtralConfig, PixtralVisionConfig
from mmjax.models.rotary import alternating_pairs
from mmjax.models.vision_inputs import VisionInputs


def vision_spec(cfg: PixtralConfig) -> dict:
    """Shapes of the parameters of tower and projector."""
    v, dtype = cfg.vision, jnp.dtype(cfg.dtype)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    width, mlp, out = v.hidden_size, v.mlp_width, v.out_hidden_size
    block = {
        "qkv": leaf(3 * width, width),
        "o": leaf(width, width),
        "gate_up": leaf(2 * mlp, width),
        "down": leaf(width, mlp),
    }
    projector = {"fc1": leaf(out, width), "fc2": leaf(out, out)}
    if v.projector_bias:
        projector |= {"fc1_bias": leaf(out), "fc2_bias": leaf(out)}
    if v.merger_norm_eps is not None:
        projector |= {"norm": leaf(width), "merger": leaf(width, width * v.merge**2)}
    return {
        "patch_embed": leaf(width, cfg.patch_values),
        "norm": leaf(width),
        "blocks": [dict(block) for _ in range(v.depth)],
        "vectors": {name: leaf(v.depth, width) for name in ("attention_norm", "mlp_norm")},
        "projector": projector,
    }


def encode(
    params: dict, cfg: PixtralConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R E"]:
    """Embedding rows of packed pictures, one a merge block of patches; rows of padding hold anything finite.

    Args:
      pixel_table: the normalised value of every byte, per channel.
      ops: static; `packed(q, k, v, cu_seqlens, scale)` attends within segments.
    """
    v = cfg.vision
    values = pixel_values(inputs.patches, inputs.num_patches, pixel_table, jnp.dtype(cfg.dtype))
    x = rms_norm(linear(values, params["patch_embed"]), params["norm"], v.norm_eps)
    # The model rounds its rotary tables to its own dtype before use.
    tables = rotary_tables(inputs.positions.T, *alternating_pairs(v.head_dim, v.rope_theta))
    cos, sin = (table.astype(x.dtype) for table in tables)
    for i, block in enumerate(params["blocks"]):
        vectors = {name: stacked[i] for name, stacked in params["vectors"].items()}
        x = _block(block, vectors, x, cos, sin, inputs.cu_seqlens, cfg=v, ops=ops)
    return _project(params["projector"], v, x)


def _project(projector: dict, v: PixtralVisionConfig, x: Float[Array, "P E"]) -> Float[Array, "R out"]:
    """Patches to rows of the text model's width."""
    if v.merger_norm_eps is not None:
        normed = rms_norm(x, projector["norm"], v.merger_norm_eps)
        # The merger reads a block value by value, for each value all patches.
        blocks = normed.reshape(-1, v.merge**2, v.hidden_size).swapaxes(1, 2)
        x = linear(blocks.reshape(len(blocks), -1), projector["merger"])
    hidden = gelu(linear(x, projector["fc1"], projector.get("fc1_bias")))
    return linear(hidden, projector["fc2"], projector.get("fc2_bias"))


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
    cfg: PixtralVisionConfig,
    ops: Any,
) -> Float[Array, "P E"]:
    normed = rms_norm(x, vectors["attention_norm"], cfg.norm_eps)
    out = tower_attention(normed, block["qkv"], None, cos, sin, cfg.num_heads, ops.packed, cu_seqlens)
    x = x + linear(out, block["o"])
    normed = rms_norm(x, vectors["mlp_norm"], cfg.norm_eps)
    return x + gated_mlp(normed, block["gate_up"], block["down"], activation=cfg.hidden_act)
