# SPDX-License-Identifier: Apache-2.0
"""The Pixtral tower over pictures whose last row or column of patches may be no whole merge block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.inputs.items import EncoderBucket
from mmjax.models.pixtral_shared import vision as pixtral
from mmjax.models.pixtral_shared.config import PixtralConfig
from mmjax.models.vision_inputs import VisionInputs, vision_input_shapes


def input_shapes(cfg: PixtralConfig, bucket: EncoderBucket) -> VisionInputs:
    """Shapes and dtypes of the inputs of one bucket; `row_order` is [R]."""
    return vision_input_shapes(cfg, bucket).replace(row_order=jax.ShapeDtypeStruct((bucket.rows,), jnp.int32))


def encode(
    params: dict, cfg: PixtralConfig, inputs: VisionInputs, pixel_table: Float[Array, "C 256"], ops: Any
) -> Float[Array, "R E"]:
    """Embedding rows of packed pictures; arguments as in Pixtral's `encode`.

    That makes a row of any `merge**2` patches that follow each other; `inputs.row_order` names those that are blocks.
    """
    return jnp.take(pixtral.encode(params, cfg, inputs, pixel_table, ops), inputs.row_order, axis=0, mode="clip")
