# SPDX-License-Identifier: Apache-2.0
"""What the compiled tower of DeepSeek-V4.1 takes: patches of several pictures, and tables of cells and rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, UInt8

from mmjax.inputs.items import EncoderBucket
from mmjax.models.deepseek_v4_1.config import DeepseekV41Config

# Learned rows, behind the features of all cells in what `rows` refers to.
START, NEWLINE, END = range(3)


@struct.dataclass
class DeepseekVisionInputs:
    """Packed patches of one encoder batch.

    Attributes:
      patches: pixel bytes, each patch laid out (channel, row, column); the patches of a picture row by row.
      num_patches: how many are real; the others are padding and may hold anything.
      positions: row and column of each patch in its picture's grid.
      cu_seqlens: where each picture starts; trailing empty segments repeat the last offset.
      cells: the patches of each cell, row by row; P beyond a picture's edges and for padding.
      rows: for each embedding row its cell, or C + START, C + NEWLINE, C + END; padding may name any of these.
    """

    patches: UInt8[Array, "P values"]
    num_patches: Int[Array, ""]
    positions: Int[Array, "P 2"]
    cu_seqlens: Int[Array, "S+1"]
    cells: Int[Array, "C patches_of_cell"]
    rows: Int[Array, "R"]


def cell_capacity(bucket: EncoderBucket, side: int) -> int:
    """Cells that pictures of a bucket have at most.

    A grid of P patches has at most P / side + (side - 1) / side cells (one patch wide); each picture has one row less
    for its start, one for its end and one for a newline.
    """
    tokens, contexts = bucket.key
    return max(1, min((tokens + contexts * (side - 1)) // side, bucket.rows))


def vision_input_shapes(cfg: DeepseekV41Config, bucket: EncoderBucket) -> DeepseekVisionInputs:
    """Shapes and dtypes of the inputs of one bucket."""
    tokens, contexts = bucket.key
    side = cfg.vision.merge
    return DeepseekVisionInputs(
        patches=jax.ShapeDtypeStruct((tokens, cfg.patch_values), jnp.uint8),
        num_patches=jax.ShapeDtypeStruct((), jnp.int32),
        positions=jax.ShapeDtypeStruct((tokens, 2), jnp.int32),
        cu_seqlens=jax.ShapeDtypeStruct((contexts + 1,), jnp.int32),
        cells=jax.ShapeDtypeStruct((cell_capacity(bucket, side), side**2), jnp.int32),
        rows=jax.ShapeDtypeStruct((bucket.rows,), jnp.int32),
    )
