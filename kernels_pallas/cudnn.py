# SPDX-License-Identifier: Apache-2.0
"""The one door to cuDNN's attention with packed segments and log-sum-exps, which JAX keeps private.

Public `jax.nn.dot_product_attention` takes no segment offsets, and rounds the log-sum-exp to the inputs' dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Releases of jax whose private function has the signature used below: from the first, up to but not the second.
FIRST, END = (0, 10, 2), (0, 13)
# From this release on, key offsets are scaled by the key heads (https://github.com/jax-ml/jax/pull/39521).
GROUPED_PACKING = (0, 11, 1)


class Packing(NamedTuple):
    """Where the segments of packed queries and keys begin, and how many tokens of each count."""

    q_starts: Int[Array, "S+1"]
    q_lens: Int[Array, " S"]
    kv_starts: Int[Array, "S+1"]
    kv_lens: Int[Array, " S"]


def available() -> bool:
    """Whether this jax is a release whose private function is known here."""
    return FIRST <= jax.__version_info__ < END


def padded_attention(
    q: Float[Array, "B R N D"],
    k: Float[Array, "B C K D"],
    v: Float[Array, "B C K D"],
    q_lens: Int[Array, " B"],
    kv_lens: Int[Array, " B"],
    scale: float,
) -> tuple[Float[Array, "B R N D"], Float[Array, "B N R"]]:
    """Attention of the first rows and columns of each batch entry, with the log-sum-exp of every row.

    What lies past a length comes back undefined; `k` and `v` must be finite there, and lengths positive.
    """
    from jax._src.cudnn import fused_attention_stablehlo as private

    return private.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=q_lens.astype(jnp.int32),
        kv_seqlen=kv_lens.astype(jnp.int32),
        scale=float(scale),
        mask_type=private.MaskType.PADDING,
        return_residual=True,
    )


def packed_attention(
    q: Float[Array, "T N D"],
    k: Float[Array, "C K D"],
    v: Float[Array, "C K D"],
    packing: Packing,
    scale: float,
    *,
    causal: bool = False,
    residual: bool = False,
) -> Float[Array, "T N D"] | tuple[Float[Array, "T N D"], Float[Array, "S N T"]]:
    """Attention inside each packed segment; with `residual` also the log-sum-exps, [S, N, T] by row of the segment.

    Rows outside every segment come back undefined; `k` and `v` must be finite there. `causal` aligns the first row of
    a segment with its first key.
    """
    from jax._src.cudnn import fused_attention_stablehlo as private

    if k.shape[1] != q.shape[1] and jax.__version_info__ < GROUPED_PACKING:
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    q_starts, q_lens, kv_starts, kv_lens = (x.astype(jnp.int32)[None] for x in packing)
    packed = q_lens.shape[1] > 1  # a single segment starts at token 0 and needs no offsets
    return jax.tree.map(
        lambda x: x[0] if x.ndim == 4 else x,
        private.dot_product_attention(
            q[None],
            k[None],
            v[None],
            q_seqlen=q_lens if packed else q_lens[0],
            kv_seqlen=kv_lens if packed else kv_lens[0],
            q_offsets=q_starts if packed else None,
            kv_offsets=kv_starts if packed else None,
            scale=float(scale),
            mask_type=private.MaskType.PADDING_CAUSAL if causal else private.MaskType.PADDING,
            return_residual=residual,
        ),
    )
