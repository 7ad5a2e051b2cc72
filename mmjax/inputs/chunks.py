# SPDX-License-Identifier: Apache-2.0
"""Cutting embedding rows to a step: the rows of each request that its chunk uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from mmjax.inputs.params import MultimodalParams, has_mm_payload_keys

Rows = Float[np.ndarray, "R E"]


def check_mm_embed_cumsum_if_needed(data: Mapping[str, Any], begin: int, end: int, prompt_len: int) -> None:
    """A prompt with media may run in part only if its cumulative row counts are known.

    Raises:
      ValueError: the chunk [begin, end) lies outside the prompt, or is a part of it and the counts are missing.
    """
    if not 0 <= begin <= end <= prompt_len:
        raise ValueError(f"chunk {begin}..{end} lies outside a prompt of {prompt_len} positions")
    if not has_mm_payload_keys(data) or "multimodal_embed_mask_cumsum" in data:
        return
    if begin > 0 or end < prompt_len:
        raise ValueError(
            f"chunk {begin}..{end} of {prompt_len} positions holds media but no multimodal_embed_mask_cumsum"
        )


def find_input_mm_embeds(mm_embeds: Sequence[Rows], multimodal_params: Sequence[MultimodalParams]) -> list[Rows]:
    """The rows that this step uses, of whole-request rows.

    Args:
      mm_embeds: the rows of each request, or one array with those of all requests in order.
      multimodal_params: the requests; those with `multimodal_runtime` are cut.

    Returns:
      One array for one joined input, else one (perhaps empty) slice a request; [] if the step uses no row. Rows that
      already have this step's size come back as they are.

    Raises:
      ValueError: several arrays, but not one for each request.
    """
    if len(mm_embeds) > 1 and len(mm_embeds) != len(multimodal_params):
        raise ValueError(f"{len(mm_embeds)} embedding arrays for {len(multimodal_params)} requests")
    if not multimodal_params or multimodal_params[0].multimodal_runtime is None:
        return list(mm_embeds)
    runtimes = [params.multimodal_runtime for params in multimodal_params]
    wanted = sum(runtime.num_mm_tokens_in_chunk for runtime in runtimes)
    if wanted == 0:
        return []
    if wanted == sum(rows.shape[0] for rows in mm_embeds):
        return list(mm_embeds)
    joined = len(mm_embeds) == 1
    slices, offset = [], 0
    for index, runtime in enumerate(runtimes):
        rows = mm_embeds[0] if joined else mm_embeds[index]
        first = offset + runtime.num_cached_mm_tokens
        slices.append(rows[first : first + runtime.num_mm_tokens_in_chunk])
        offset += runtime.total_embeds_in_request if joined else 0
    return [np.concatenate(slices)] if joined else slices
