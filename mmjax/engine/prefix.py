# SPDX-License-Identifier: Apache-2.0
"""Making the pages of a request known to the prefix cache as they fill."""

from __future__ import annotations

from mmjax.engine.pages import PageAllocator
from mmjax.engine.request import Request
from mmjax.inputs.kv_key import block_key


def register_pages(pages: PageAllocator, request: Request) -> None:
    """Registers every full page whose tokens are known and whose KV is written or dispatched.

    A page may be read by a later step at once: the device runs steps in the order of their dispatch.
    """
    if not request.key_tokens:
        return
    known = min(request.computed, request.prompt_len + len(request.output_ids))
    full = known // pages.tokens_per_block
    while len(request.block_keys) < full:
        if len(request.key_tokens) < full * pages.tokens_per_block:
            request.key_tokens = [*request.key_tokens[: request.prompt_len], *request.output_ids]
        start = len(request.block_keys) * pages.tokens_per_block
        parent = request.block_keys[-1] if request.block_keys else request.prompt.root
        request.block_keys.append(block_key(parent, request.key_tokens[start : start + pages.tokens_per_block]))
    if full > request.registered:
        pages.register(request.table, request.block_keys[:full], request.key_tokens)
        request.registered = full
