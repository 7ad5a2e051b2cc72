# SPDX-License-Identifier: Apache-2.0
"""Which implementation serves which operation: decided by capability, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kernels_pallas.packed_xla import packed_attention_xla
from kernels_pallas.paged_xla import paged_decode_xla, paged_prefill_xla
from kernels_pallas.reference import causal_attend, packed_attention_reference, window_attention_reference
from kernels_pallas.window_xla import window_attention_xla


class VisionOps(NamedTuple):
    """The attention callables of a vision tower; hashable, so it can be a static argument of jit.

    Attributes:
      packed: (q, k, v [P, heads, D], cu_seqlens [S+1], scale) -> [P, N, D].
      windowed: (q, k, v [P, heads, D], window_index [W, C], scale) -> [P, N, D].
    """

    packed: Callable
    windowed: Callable


@dataclass(frozen=True)
class AttentionChoice:
    """The implementation of each operation for one platform, dtype and head dim; the engine prints it."""

    packed: str
    windowed: str
    prefill: str
    decode: str


def vision_ops(platform: str) -> VisionOps:
    """The vision attention of `platform` ("cpu", "cuda")."""
    return VisionOps(packed_attention_xla, window_attention_xla)


def prefill_attention(platform: str) -> Callable:
    """The `attend` callable of prefill steps: (q, k, v, kv_layer, PagedPrefill, scale) -> (out, kv_layer)."""
    return paged_prefill_xla


def decode_attention(platform: str) -> Callable:
    """The `attend` callable of decode steps: (q, k, v, kv_layer, PagedDecode, scale) -> (out, kv_layer)."""
    return paged_decode_xla


def reference_vision_ops() -> VisionOps:
    """Plain dense masks in float32, for the reference."""
    return VisionOps(packed_attention_reference, window_attention_reference)


def reference_attention() -> Callable:
    """The `attend` callable of the reference: one whole sequence, causal, no pages."""
    return causal_attend


def choices(platform: str, dtype: str, head_dim: int) -> AttentionChoice:
    """What `vision_ops`, `prefill_attention` and `decode_attention` run for arrays of this kind."""
    return AttentionChoice("xla", "xla", "xla", "xla")
