# SPDX-License-Identifier: Apache-2.0
"""Which implementation serves which operation: decided from device, dtype and head dim, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from kernels_pallas import cudnn, mosaic
from kernels_pallas.attention_cudnn import (
    packed_attention_cudnn,
    paged_decode_cudnn,
    paged_prefill_cudnn,
    window_attention_cudnn,
)
from kernels_pallas.packed_xla import packed_attention_xla
from kernels_pallas.paged_kv import PagedDecode, PagedPrefill
from kernels_pallas.paged_xla import paged_decode_xla, paged_prefill_xla
from kernels_pallas.reference import causal_attend, packed_attention_reference, window_attention_reference
from kernels_pallas.window_xla import window_attention_xla

__all__ = [
    "AttentionChoice",
    "Device",
    "PagedDecode",
    "PagedPrefill",
    "VisionOps",
    "choices",
    "choose",
    "decode_attention",
    "prefill_attention",
    "reference_attention",
    "reference_vision_ops",
    "vision_ops",
]

HOPPER, AMPERE = (9, 0), (8, 0)


def _packed_mosaic(q, k, v, cu_seqlens, scale, causal):
    if causal or len(q) % mosaic.ROW_TILE:
        other = packed_attention_cudnn if cudnn.available() else packed_attention_xla
        return other(q, k, v, cu_seqlens, scale, causal)
    from kernels_pallas.packed_mosaic import packed_attention_mosaic

    return packed_attention_mosaic(q, k, v, cu_seqlens, scale)


def _windowed_mosaic(q, k, v, window_seqlens, scale, capacity):
    if len(q) % mosaic.ROW_TILE:
        return window_attention_cudnn(q, k, v, window_seqlens, scale, capacity)
    from kernels_pallas.packed_mosaic import make_plan, packed_attention_mosaic

    plan = make_plan(q, k, len(window_seqlens) - 1, capacity)
    return packed_attention_mosaic(q, k, v, window_seqlens, scale, plan)


_PACKED = {"xla": packed_attention_xla, "cudnn": packed_attention_cudnn, "mosaic": _packed_mosaic}
_WINDOWED = {"xla": window_attention_xla, "cudnn": window_attention_cudnn, "mosaic": _windowed_mosaic}


def _prefill_mosaic(q, *rest):
    if len(q) % mosaic.ROW_TILE:
        return (paged_prefill_cudnn if cudnn.available() else paged_prefill_xla)(q, *rest)
    from kernels_pallas.paged_prefill_mosaic import paged_prefill_mosaic

    return paged_prefill_mosaic(q, *rest)


_PREFILL = {"xla": paged_prefill_xla, "cudnn": paged_prefill_cudnn, "mosaic": _prefill_mosaic}


def _decode_mosaic(*arguments):
    from kernels_pallas.paged_decode_mosaic import paged_decode_mosaic

    return paged_decode_mosaic(*arguments)


_DECODE = {"xla": paged_decode_xla, "cudnn": paged_decode_cudnn, "mosaic": _decode_mosaic}


class VisionOps(NamedTuple):
    """The attention callables of a vision tower; hashable, so it can be a static argument of jit.

    Attributes:
      packed: (q, k, v [P, heads, D], cu_seqlens [S+1], scale) -> [P, N, D].
      windowed: (q, k, v [P, heads, D], window_seqlens [W+1], scale, capacity) -> [P, N, D]; segments of at most
        `capacity` patches, which is static.
    """

    packed: Callable
    windowed: Callable


@dataclass(frozen=True)
class AttentionChoice:
    """The implementation of each operation: "xla", "cudnn" or "mosaic"."""

    packed: str = "xla"
    windowed: str = "xla"
    prefill: str = "xla"
    decode: str = "xla"


@dataclass(frozen=True)
class Device:
    """What the choice needs to know of a device; the compute capability is (0, 0) where there is none."""

    platform: str
    compute_capability: tuple[int, int] = (0, 0)


@cache
def local_device(platform: str) -> Device:
    """The first local device of `platform` ("cpu", "cuda", or "gpu" as JAX's default backend calls it)."""
    if platform not in ("cuda", "gpu"):
        return Device(platform)
    major, minor = jax.local_devices(backend="cuda")[0].compute_capability.split(".")
    return Device("cuda", (int(major), int(minor)))


def choose(device: Device, dtype: DTypeLike, head_dim: int, *, page: int = 64, group: int = 1) -> AttentionChoice:
    """The fastest implementation that supports this device, dtype and head dim; for decode also pages and heads.

    `page`: tokens of a page; `group`: query heads a key head. cuDNN wants half precision and a head dim that is a
    multiple of 8, up to 256 on Hopper and 128 before it; packed segments need Hopper.
    """
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    widest = 256 if device.compute_capability >= HOPPER else 128
    fits = half and head_dim % 8 == 0 and head_dim <= widest
    if not (fits and device.platform == "cuda" and device.compute_capability >= AMPERE):
        return AttentionChoice()
    private = "cudnn" if cudnn.available() else "xla"
    packed = private if device.compute_capability >= HOPPER else "xla"
    hopper = mosaic.available(device.compute_capability)
    return AttentionChoice(
        packed="mosaic" if hopper and mosaic.serves_packed(dtype, head_dim) else packed,
        windowed="mosaic" if hopper and mosaic.serves_windows(dtype, head_dim) else "cudnn",
        prefill="mosaic" if hopper and mosaic.serves_prefill(dtype, head_dim, page) else packed,
        decode="mosaic" if hopper and mosaic.serves_decode(dtype, head_dim, page, group) else private,
    )


def choices(platform: str, dtype: DTypeLike, head_dim: int, *, page: int = 64, group: int = 1) -> AttentionChoice:
    """What `vision_ops`, `prefill_attention` and `decode_attention` run for arrays of this kind."""
    return choose(local_device(platform), dtype, head_dim, page=page, group=group)


def vision_ops(platform: str) -> VisionOps:
    """The vision attention of `platform` ("cpu", "cuda")."""
    if local_device(platform).platform == "cuda":
        return VisionOps(_packed_on_cuda, _windowed_on_cuda)
    return VisionOps(packed_attention_xla, window_attention_xla)


def prefill_attention(platform: str) -> Callable:
    """The `attend` callable of prefill steps: (q, k, v, kv_layer, PagedPrefill, scale) -> (out, kv_layer)."""
    return _prefill_on_cuda if local_device(platform).platform == "cuda" else paged_prefill_xla


def decode_attention(platform: str) -> Callable:
    """The `attend` callable of decode steps: (q, k, v, kv_layer, PagedDecode, scale) -> (out, kv_layer)."""
    return _decode_on_cuda if local_device(platform).platform == "cuda" else paged_decode_xla


def reference_vision_ops() -> VisionOps:
    """Plain dense masks in float32, for the reference."""
    return VisionOps(packed_attention_reference, window_attention_reference)


def reference_attention() -> Callable:
    """The `attend` callable of the reference: one whole sequence, causal, no pages."""
    return causal_attend


def _choice_for(q) -> AttentionChoice:
    return choices("cuda", q.dtype, q.shape[-1])


def _packed_on_cuda(q, k, v, cu_seqlens, scale, causal=False):
    return _PACKED[_choice_for(q).packed](q, k, v, cu_seqlens, scale, causal)


def _windowed_on_cuda(q, k, v, window_seqlens, scale, capacity):
    return _WINDOWED[_choice_for(q).windowed](q, k, v, window_seqlens, scale, capacity)


def _prefill_on_cuda(q, k, v, kv_layer, meta, scale):
    return _PREFILL[_paged_choice_for(q, k, kv_layer).prefill](q, k, v, kv_layer, meta, scale)


def _decode_on_cuda(q, k, v, kv_layer, meta, scale):
    return _DECODE[_paged_choice_for(q, k, kv_layer).decode](q, k, v, kv_layer, meta, scale)


def _paged_choice_for(q, k, kv_layer) -> AttentionChoice:
    return choices("cuda", q.dtype, q.shape[-1], page=kv_layer.shape[3], group=q.shape[1] // k.shape[1])
