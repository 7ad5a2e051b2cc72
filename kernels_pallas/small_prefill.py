# SPDX-License-Identifier: Apache-2.0
"""A prefill step of few tokens as a decode step: each token is a sequence of its own that ends with it.

Its keys and those before it in the chunk are in pages by then, so no token needs a second attention over the prefix,
and nobody needs to learn how long prefixes are before the step starts. Prefixes are read once a token, mostly from
the cache.
"""

from __future__ import annotations

import jax.numpy as jnp

from kernels_pallas.packed_xla import segment_of_token
from kernels_pallas.paged_kv import PagedDecode, PagedPrefill


def as_decode(meta: PagedPrefill, tokens: int) -> PagedDecode:
    """The decode step of `tokens` rows that computes what the prefill step of as many packed tokens does."""
    cu = meta.cu_seqlens
    segment = segment_of_token(cu, tokens)
    row = jnp.minimum(segment, len(meta.prefix_lens) - 1)
    index = jnp.arange(tokens, dtype=jnp.int32) - cu[row]
    lens = jnp.where(segment < len(meta.prefix_lens), meta.prefix_lens[row] + index + 1, 0)
    return PagedDecode(seq_lens=lens, block_tables=meta.block_tables[row], slots=meta.slots)
