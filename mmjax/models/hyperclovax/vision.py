# SPDX-License-Identifier: Apache-2.0
"""The tower of Qwen2.5-VL, then a linear map to the decoder's width."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.layers.linear import linear
from mmjax.models.hyperclovax.config import HyperClovaXConfig
from mmjax.models.qwen2_5_vl import vision as tower
from mmjax.models.vision_inputs import VisionInputs


def vision_spec(cfg: HyperClovaXConfig) -> dict:
    """Shapes of the parameters of tower and projector."""
    dtype, width = jnp.dtype(cfg.dtype), cfg.hidden_size
    return tower.vision_spec(cfg) | {
        "projector": jax.ShapeDtypeStruct((width, cfg.vision.out_hidden_size), dtype),
        "projector_bias": jax.ShapeDtypeStruct((width,), dtype),
    }


def encode(
    params: dict, cfg: HyperClovaXConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R E"]:
    """Embedding rows of packed items, one a merge block of patches; arguments as of Qwen2.5-VL's `encode`."""
    rows = tower.encode(params, cfg, inputs, pixel_table, ops)
    return linear(rows, params["projector"], params["projector_bias"])
