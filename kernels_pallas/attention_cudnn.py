# SPDX-License-Identifier: Apache-2.0
"""The operations through cuDNN's fused attention: half precision, on NVIDIA GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import cudnn
from kernels_pallas.blocks import NEVER
from kernels_pallas.packed_xla import segment_of_token
from kernels_pallas.paged_kv import PagedDecode, PagedPrefill, read_pages, write_kv
from kernels_pallas.window_xla import gather_windows, rows_to_patches, window_table

# Bytes of keys and values gathered from pages at a time.
GATHER_BYTES = 64 << 20
# Tokens of each prefix gathered at a time: most prefixes are shorter, and what is gathered past their ends is waste.
PREFIX_TOKENS = 4096


def packed_attention_cudnn(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    cu_seqlens: Int[Array, "S+1"],
    scale: float,
    causal: bool = False,
) -> Float[Array, "P N D"]:
    """Attention inside each packed segment; tokens past cu_seqlens[-1] give zeros, whatever they hold."""
    real = _is_real(q, cu_seqlens)
    lens = jnp.diff(cu_seqlens)
    packing = cudnn.Packing(cu_seqlens, lens, cu_seqlens, lens)
    out = cudnn.packed_attention(q, jnp.where(real, k, 0), jnp.where(real, v, 0), packing, scale, causal=causal)
    return jnp.where(real, out, 0)


def window_attention_cudnn(
    q: Float[Array, "P N D"],
    k: Float[Array, "P K D"],
    v: Float[Array, "P K D"],
    window_seqlens: Int[Array, "W+1"],
    scale: float,
    capacity: int,
) -> Float[Array, "P N D"]:
    """Attention inside each window, a packed segment of at most `capacity` patches; as a batch of padded windows.

    Patches past window_seqlens[-1] give zeros, whatever they hold.
    """
    table = window_table(window_seqlens, capacity, q.shape[0])
    # Length 1 keeps the rows of an empty window defined: they are zeros, and no patch takes them.
    lens = jnp.maximum(jnp.diff(window_seqlens), 1)
    rows = jax.nn.dot_product_attention(
        *(gather_windows(x, table) for x in (q, k, v)),
        scale=float(scale),
        query_seq_lengths=lens,
        key_value_seq_lengths=lens,
        implementation="cudnn",
    )
    return rows_to_patches(rows.reshape(-1, *q.shape[1:]), table, q.shape[0])


def paged_prefill_cudnn(
    q: Float[Array, "T N D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    meta: PagedPrefill,
    scale: float,
) -> tuple[Float[Array, "T N D"], Float[Array, "num_blocks 2 K page D"]]:
    """Writes the chunks into their pages, then lets each token attend to its sequence up to itself.

    Two attentions, joined by their log-sum-exps: causal inside the chunk, straight from `k` and `v`, and unmasked over
    the prefix, gathered from pages a slab at a time. The host must wait before each layer to learn the number of
    slabs, unless `meta` promises that there is no prefix.
    """
    kv_layer = write_kv(kv_layer, k, v, meta.slots)
    cu, lens = meta.cu_seqlens, jnp.diff(meta.cu_seqlens)
    real = _is_real(q, cu)
    packing = cudnn.Packing(cu, lens, cu, lens)
    k, v = jnp.where(real, k, 0), jnp.where(real, v, 0)
    if not meta.any_prefix:
        out = cudnn.packed_attention(q, k, v, packing, scale, causal=True)
        return jnp.where(real, out, 0), kv_layer
    out, lse = cudnn.packed_attention(q, k, v, packing, scale, causal=True, residual=True)
    out = _attend_prefixes(q, out, lse, kv_layer, meta, scale)
    return jnp.where(real, out, 0).astype(q.dtype), kv_layer


def _attend_prefixes(
    q: Float[Array, "T N D"],
    out: Float[Array, "T N D"],
    lse: Float[Array, "S N T"],
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    meta: PagedPrefill,
    scale: float,
) -> Float[Array, "T N D"]:
    """`out`, whose log-sum-exps are `lse`, after each token also attended to the prefix of its sequence; float32."""
    cu, lens = meta.cu_seqlens, jnp.diff(meta.cu_seqlens)
    segment = segment_of_token(cu, q.shape[0])
    state = out.astype(jnp.float32), _lse_of_token(lse, cu, segment)
    page = kv_layer.shape[3]
    pages = min(_pages_per_slab(kv_layer, *meta.block_tables.shape), max(1, PREFIX_TOKENS // page))
    slab = pages * page

    def attend_slab(index, state):
        left = jnp.clip(meta.prefix_lens - index * slab, 0, slab)
        keys, values = _gather_slab(kv_layer, meta.block_tables, index, pages, left, q.dtype)
        starts = jnp.arange(left.shape[0] + 1, dtype=jnp.int32) * slab
        packing = cudnn.Packing(cu, jnp.where(left > 0, lens, 0), starts, left)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (keys, values))
        out, lse = cudnn.packed_attention(q, *flat, packing, scale, residual=True)
        met = jnp.append(left > 0, False)[segment][:, None]
        return _join(state, (out, _lse_of_token(lse, cu, segment)), met)

    slabs = -(-meta.prefix_lens.max() // slab)
    return jax.lax.fori_loop(0, slabs, attend_slab, state)[0]


def paged_decode_cudnn(
    q: Float[Array, "B N D"],
    k: Float[Array, "B K D"],
    v: Float[Array, "B K D"],
    kv_layer: Float[Array, "num_blocks 2 K page D"],
    meta: PagedDecode,
    scale: float,
) -> tuple[Float[Array, "B N D"], Float[Array, "num_blocks 2 K page D"]]:
    """Writes one token a sequence, then lets it attend to its whole sequence; rows of length 0 give zeros.

    A small table is gathered whole, without a loop; a large one slab by slab, until the longest sequence is done.
    """
    kv_layer = write_kv(kv_layer, k, v, meta.slots)
    pages = _pages_per_slab(kv_layer, *meta.block_tables.shape)
    slab = pages * kv_layer.shape[3]

    def attend_slab(index, state):
        left = jnp.clip(meta.seq_lens - index * slab, 0, slab)
        keys, values = _gather_slab(kv_layer, meta.block_tables, index, pages, left, q.dtype)
        ones = jnp.ones_like(left)
        out, lse = cudnn.padded_attention(q[:, None], keys, values, ones, jnp.maximum(left, 1), scale)
        return _join(state, (out[:, 0], lse[:, :, 0]), (left > 0)[:, None])

    state = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:2], NEVER, jnp.float32)
    if pages >= meta.block_tables.shape[1]:
        out, _ = attend_slab(0, state)
    else:
        out, _ = jax.lax.fori_loop(0, -(-meta.seq_lens.max() // slab), attend_slab, state)
    return out.astype(q.dtype), kv_layer


def _is_real(x: Float[Array, "T N D"], cu_seqlens: Int[Array, "S+1"]):
    """[T, 1, 1]: whether a token lies before the last offset."""
    return (jnp.arange(x.shape[0], dtype=jnp.int32) < cu_seqlens[-1])[:, None, None]


def _lse_of_token(
    lse: Float[Array, "S N T"], cu_seqlens: Int[Array, "S+1"], segment: Int[Array, " T"]
) -> Float[Array, "T N"]:
    """Row i of segment s stands at lse[s, :, i]; brings the rows into packed order."""
    segment = jnp.minimum(segment, lse.shape[0] - 1)
    row = jnp.arange(segment.shape[0], dtype=jnp.int32) - cu_seqlens[segment]
    return lse[segment, :, row]


def _join(state, other, met):
    """Merges two attentions of the same rows over disjoint keys; `met` says which rows the other one covers."""
    (out, lse), (other_out, other_lse) = state, other
    other_lse = jnp.where(met, other_lse, NEVER)
    other_out = jnp.where(met[..., None], other_out.astype(jnp.float32), 0)
    joined = jnp.logaddexp(lse, other_lse)
    weights = jnp.exp(lse - joined)[..., None], jnp.exp(other_lse - joined)[..., None]
    return out * weights[0] + other_out * weights[1], joined


def _pages_per_slab(kv_layer: Float[Array, "num_blocks 2 K page D"], sequences: int, table_width: int) -> int:
    """Pages of each sequence that one slab holds."""
    page_bytes = kv_layer.size // kv_layer.shape[0] * kv_layer.dtype.itemsize
    return max(1, min(table_width, GATHER_BYTES // (sequences * page_bytes)))


def _gather_slab(kv_layer, block_tables, index, pages: int, lens, dtype):
    """Keys and values of slab `index` of each sequence, [S, slab, K, D], zeros past `lens`."""
    ids = block_tables.at[:, index * pages + jnp.arange(pages, dtype=jnp.int32)].get(mode="clip")
    valid = jnp.arange(pages * kv_layer.shape[3], dtype=jnp.int32) < lens[:, None]
    return tuple(x.transpose(0, 2, 1, 3) for x in read_pages(kv_layer, ids, valid, dtype))
