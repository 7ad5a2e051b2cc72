# SPDX-License-Identifier: Apache-2.0
"""Identity of KV blocks: key tokens in which items stand as their content, and the chain of block keys over them.

Placeholder ids are equal for every picture, so blocks keyed by ids alone would be shared between different pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from blake3 import blake3

from mmjax.inputs.hashing import derive_key, hexdigest_to_int32, int32_to_bytes
from mmjax.inputs.params import MultimodalInput

ROOT_CONTEXT = "mmjax tenant salt of KV prefix keys, version 1"
KeyToken: TypeAlias = int | bytes


class DigestToken(bytes):
    """An item's 32-byte digest that remembers the caller's name for it; equality and hash are those of the bytes."""

    uuid: str

    def __new__(cls, digest: bytes, uuid: str) -> DigestToken:
        token = super().__new__(cls, digest)
        token.uuid = uuid
        return token


def mm_key_tokens(digest: bytes, offset: int, count: int, vocab_size: int, uuid: str | None = None) -> list[KeyToken]:
    """Key tokens of `count` positions of an item, from its `offset`-th on: the digest first, then `vocab_size + o`."""
    tokens: list[KeyToken] = list(range(vocab_size + offset, vocab_size + offset + count))
    if tokens and offset == 0:
        tokens[0] = digest if uuid is None else DigestToken(digest, uuid)
    return tokens


def augment_tokens_for_block_reuse(
    token_ids: Sequence[int],
    mm_input: MultimodalInput | None,
    vocab_size: int,
    start: int = 0,
    end: int | None = None,
) -> list[KeyToken]:
    """Key tokens of the prompt positions [start, end): ids, with every item position replaced.

    Args:
      token_ids: the whole expanded prompt.
      mm_input: its items; text between an item's runs keeps its ids. None leaves the ids as they are, which is only
        right for a prompt without media.

    Raises:
      ValueError: a hash that is not 8 signed 32-bit integers.
    """
    end = len(token_ids) if end is None else end
    tokens: list[KeyToken] = [int(token) for token in token_ids[start:end]]
    if mm_input is None:
        return tokens
    uuids = mm_input.multimodal_uuids or []
    for item, words in enumerate(mm_input.multimodal_hashes):
        uuid = uuids[item] if item < len(uuids) else None
        digest = int32_to_bytes(words)
        offset = 0
        for position, length in mm_input.item_runs(item):
            first, last = max(start, position), min(end, position + length)
            if first < last:
                replacement = mm_key_tokens(digest, offset + first - position, last - first, vocab_size, uuid)
                tokens[first - start : last - start] = replacement
            offset += length
    return tokens


def prefix_hash(words: Sequence[int], options_hash: str) -> list[int]:
    """An item's digest for the prefix cache: its content and the resolved options it was processed with.

    One picture processed in two ways may fill equally many positions; its KV is still not the same.
    """
    return hexdigest_to_int32(blake3(int32_to_bytes(words) + bytes.fromhex(options_hash)).hexdigest())


def root_key(salt: str | None = None) -> bytes:
    """Parent of every first block. A tenant's salt gives that tenant a tree of its own."""
    return bytes(32) if salt is None else derive_key(salt, ROOT_CONTEXT)


def block_key(parent: bytes, tokens: Sequence[KeyToken]) -> bytes:
    """Key of a block: BLAKE3 over its parent's key and its key tokens.

    Tokens are counted, then written as 64-bit integers with -1 for each digest, then come the digests in order.
    """
    digests = [bytes(token) for token in tokens if isinstance(token, bytes)]
    numbers = np.fromiter((-1 if isinstance(token, bytes) else token for token in tokens), np.dtype(">i8"), len(tokens))
    return blake3(b"".join([parent, len(tokens).to_bytes(8, "big"), numbers.tobytes(), *digests])).digest()


def block_keys(tokens: Sequence[KeyToken], tokens_per_block: int, root: bytes) -> list[bytes]:
    """Keys of all full blocks of a sequence, chained from `root`; a last part shorter than a block has none."""
    keys, parent = [], root
    for begin in range(0, len(tokens) - tokens_per_block + 1, tokens_per_block):
        parent = block_key(parent, tokens[begin : begin + tokens_per_block])
        keys.append(parent)
    return keys
