# SPDX-License-Identifier: Apache-2.0
"""Pairs the tensors of a checkpoint with the leaves of a family, and reports all that does not fit, at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conversion.checkpoint import HEADS, Checkpoint
from conversion.layout import Leaf
from conversion.safetensors_file import FLOAT_DTYPES, INTEGER_DTYPES, StoredTensor, read_bytes
from mmjax.errors import CheckpointError
from mmjax.models.family import Family

# Buffers that older exports wrote and that every family computes for itself.
HARMLESS_SUFFIXES = (".inv_freq", ".position_ids")

EMBED_LEAF = "text.embed"

SHOWN = 10  # names listed in each group of an error
COMPARE_BLOCK_BYTES = 16 << 20


def best_plan(checkpoint: Checkpoint, family: Family, plans: Sequence[list[Leaf]]) -> list[Leaf]:
    """The plan that has the most shapes in common with the stored tensors, the first of equals; `match` says the rest.

    No tensor is judged by itself: two layouts may share a shape that is square.
    """
    if len(plans) == 1:
        return plans[0]
    stored = {family.canonical_name(tensor.name): tensor.shape for tensor in checkpoint.tensors()}

    def misfits(plan: list[Leaf]) -> int:
        return sum(stored.get(piece.name) != piece.shape for leaf in plan for piece in leaf.pieces)

    return min(plans, key=misfits)


def match(checkpoint: Checkpoint, family: Family, plan: Sequence[Leaf]) -> dict[str, StoredTensor]:
    """Stored tensors by canonical name, exactly those that `plan` needs.

    A tied checkpoint may also store its head, or only its head, as long as that is the embedding.

    Raises:
      CheckpointError: every missing, unexpected, doubled, misshaped and wrongly typed tensor, and a head that differs
        from the embedding it should be tied to.
    """
    wanted = {piece.name: piece for leaf in plan for piece in leaf.pieces}
    integers = {piece.name for leaf in plan if np.issubdtype(leaf.dtype, np.integer) for piece in leaf.pieces}
    stored: dict[str, StoredTensor] = {}
    doubled, misshaped, wrong_dtype = [], [], []
    for tensor in checkpoint.tensors():
        name = family.canonical_name(tensor.name)
        if name in stored:
            doubled.append(f"{tensor.name} and {stored[name].name}")
        stored[name] = tensor
    _settle_tied_head(checkpoint.path, plan, wanted.keys(), stored)
    for name in wanted.keys() & stored.keys():
        tensor = stored[name]
        if tensor.shape != wanted[name].shape:
            misshaped.append(f"{tensor.name}: {list(tensor.shape)}, config.json implies {list(wanted[name].shape)}")
        elif tensor.dtype not in (INTEGER_DTYPES if name in integers else FLOAT_DTYPES):
            wrong_dtype.append(f"{tensor.name}: {tensor.dtype}")
    unexpected = [
        tensor.name for name, tensor in stored.items() if name not in wanted and not name.endswith(HARMLESS_SUFFIXES)
    ]
    groups = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": unexpected,
        "stored twice": doubled,
        "misshaped": sorted(misshaped),
        "of a dtype that is not float32, float16 or bfloat16, or int64 or int32 for tables": sorted(wrong_dtype),
    }
    raise_if_any(checkpoint.path, family.name, groups)
    return {name: stored[name] for name in wanted}


def raise_if_any(path: Path, family_name: str, groups: dict[str, Sequence[str]]) -> None:
    """Raises one CheckpointError that lists every group with its count and its first names."""
    if not any(groups.values()):
        return
    lines = [f"{path} does not hold the weights of a {family_name} model as its config.json describes it"]
    for title, names in groups.items():
        if names:
            lines.append(f"  {len(names)} {title}:")
            lines += [f"    {name}" for name in names[:SHOWN]]
            if len(names) > SHOWN:
                lines.append(f"    and {len(names) - SHOWN} more")
    raise CheckpointError("\n".join(lines))


def _settle_tied_head(path: Path, plan: Sequence[Leaf], wanted, stored: dict[str, StoredTensor]) -> None:
    """In a tied model, drops a stored head that repeats the embedding, or lets it stand in for a missing one."""
    heads = (HEADS & stored.keys()) - set(wanted)
    if not heads:
        return
    (name,) = heads
    embed = next(leaf.pieces[0].name for leaf in plan if leaf.path == EMBED_LEAF)
    head = stored.pop(name)
    if embed not in stored:
        stored[embed] = head
    elif not _equal(head, stored[embed]):
        raise CheckpointError(
            f"{path}: config.json ties {head.name} to the embedding, but the stored tensors differ; set"
            ' "tie_word_embeddings": false in config.json to use both'
        )


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    for start in range(0, first.nbytes, COMPARE_BLOCK_BYTES):
        size = min(COMPARE_BLOCK_BYTES, first.nbytes - start)
        blocks = [np.empty(size, np.uint8), np.empty(size, np.uint8)]
        read_bytes(first, blocks[0], start)
        read_bytes(second, blocks[1], start)
        if not np.array_equal(*blocks):
            return False
    return True
