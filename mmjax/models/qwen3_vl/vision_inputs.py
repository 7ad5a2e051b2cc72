# SPDX-License-Identifier: Apache-2.0
"""What the compiled Qwen3-VL tower takes: packed patches, and where each looks into the table of learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int

from mmjax.inputs.items import EncoderBucket
from mmjax.models.family import ModelConfig
from mmjax.models.vision_inputs import VisionInputs, vision_input_shapes

TAPS = 4  # corners of a cell of the position table


@struct.dataclass
class Qwen3VLVisionInputs(VisionInputs):
    """Packed patches of one encoder batch.

    Attributes:
      table_index: entries of the position table that are mixed for each patch.
      table_weight: how much of each; zero for padding.
    """

    table_index: Int[Array, "P 4"]
    table_weight: Float32[Array, "P 4"]


def qwen3_vl_input_shapes(cfg: ModelConfig, bucket: EncoderBucket) -> Qwen3VLVisionInputs:
    """Shapes and dtypes of the inputs of one bucket."""
    taps = (bucket.key.total_tokens, TAPS)
    return Qwen3VLVisionInputs(
        **vars(vision_input_shapes(cfg, bucket)),
        table_index=jax.ShapeDtypeStruct(taps, jnp.int32),
        table_weight=jax.ShapeDtypeStruct(taps, jnp.float32),
    )
