# SPDX-License-Identifier: Apache-2.0
"""What a compiled vision tower takes: patches of several items, packed and padded to a bucket."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, UInt8

from mmjax.inputs.items import EncoderBucket
from mmjax.models.family import ModelConfig


@struct.dataclass
class VisionInputs:
    """Packed patches of one encoder batch.

    Attributes:
      patches: pixel bytes, each patch laid out (channel, time, row, column). Patches of an item are in merge-block
        order: time, block row, block column, row in block, column in block. In towers with windows, the merge blocks
        of each frame go window after window instead.
      num_patches: how many are real; the others are padding and may hold anything.
      positions: row and column of each patch in its item's grid.
      cu_seqlens: where each attention segment (one temporal step of one item) starts; trailing empty segments
        repeat the last offset.
      window_seqlens: where each attention window starts, like `cu_seqlens`; W is 0 without windows.
      row_order: for each embedding row, one a merge block in merge-block order, its place in the order of patches;
        padding names any. Shape [0] without windows.
    """

    patches: UInt8[Array, "P values"]
    num_patches: Int[Array, ""]
    positions: Int[Array, "P 2"]
    cu_seqlens: Int[Array, "S+1"]
    window_seqlens: Int[Array, "W+1"]
    row_order: Int[Array, " R"]


def vision_input_shapes(cfg: ModelConfig, bucket: EncoderBucket) -> VisionInputs:
    """Shapes and dtypes of the inputs of one bucket."""
    tokens, contexts = bucket.key
    return VisionInputs(
        patches=jax.ShapeDtypeStruct((tokens, cfg.patch_values), jnp.uint8),
        num_patches=jax.ShapeDtypeStruct((), jnp.int32),
        positions=jax.ShapeDtypeStruct((tokens, 2), jnp.int32),
        cu_seqlens=jax.ShapeDtypeStruct((contexts + 1,), jnp.int32),
        window_seqlens=jax.ShapeDtypeStruct((bucket.window_rows + 1,), jnp.int32),
        row_order=jax.ShapeDtypeStruct((tokens // cfg.merge if cfg.window_capacity else 0,), jnp.int32),
    )
