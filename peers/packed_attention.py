# SPDX-License-Identifier: Apache-2.0
"""A tower's attention in one call over all segments: torch's variable-length attention in transformers' interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers

# Towers hand over all segments at once, with their offsets, to an attention that has "flash" in its name.
NAME = "packed_flash_varlen"


def varlen_attention(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """torch's `varlen_attn`, None where it can't run: it computes in half precision, on a GPU, from torch 2.11 on."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not half or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "scale" in inspect.signature(varlen_attn).parameters else None


def pack_tower(model: torch.nn.Module, varlen: Callable[..., torch.Tensor]) -> bool:
    """Lets every module that takes segment offsets attend through `varlen`. False if the model has none.

    transformers checks the name of an attention when a model is made, and takes one with "flash" in it for a kernel to
    download. So the name goes into the tower's config afterwards, through a property that is not documented.
    """
    configs = [module.config for module in model.modules() if _takes_segments(module)]
    if configs:
        transformers.AttentionInterface.register(NAME, _packed(varlen))
    for config in configs:
        config._attn_implementation = NAME
    return bool(configs)


def _takes_segments(module: torch.nn.Module) -> bool:
    return hasattr(module, "config") and "cu_seqlens" in inspect.signature(type(module).forward).parameters


def _packed(varlen: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float,
        cu_seq_lens_q: torch.Tensor,
        max_length_q: int,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query, key and value [1, N, P, D] give [1, P, N, D]."""
        packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        offsets = cu_seq_lens_q.to(torch.int32)
        out = varlen(*packed, offsets, offsets, max_length_q, max_length_q, scale=scaling)
        return out[None], None

    return attend
