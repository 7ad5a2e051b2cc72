# SPDX-License-Identifier: Apache-2.0
"""From compact ids and items to everything the engine must know of a prompt, computed once for the whole prompt."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int32

from mmjax.errors import EngineError, PlaceholderError
from mmjax.inputs.hashing import hexdigest_to_int32
from mmjax.inputs.items import Modality
from mmjax.inputs.kv_key import prefix_hash, root_key
from mmjax.inputs.masks import find_mm_token_runs_from_mask, mm_embed_cumsum, validate_mm_inputs
from mmjax.inputs.params import MultimodalInput
from mmjax.inputs.prompt import ItemInput, PreparedPrompt, PromptItem
from mmjax.inputs.prompt_forms import absorb_wrappers, placeholder_slots
from mmjax.inputs.truncate import Side, fit_prompt
from mmjax.models.family import Processor


def prepare_prompt(
    compact_ids: Int32[np.ndarray, "S"],
    items: Sequence[ItemInput],
    processor: Processor,
    *,
    vocab_size: int,
    salt: str | None = None,
    limit: int | None = None,
    truncate: Side | None = None,
) -> PreparedPrompt:
    """Expands placeholders and computes masks, runs, positions, identities and cache keys.

    Args:
      compact_ids: the prompt with one placeholder id an item.
      items: in the order of their placeholders.
      vocab_size: of the text model; key tokens of items start there.
      salt: a tenant's secret; the items' digests must have been made under the same one.
      limit, truncate: see `fit_prompt`.

    Raises:
      PlaceholderError: placeholders and items differ in number or kind, or positions and rows of an item in number; or
        a position without a row holds an id that has no embedding.
      PromptTooLongError: the prompt exceeds `limit`.
    """
    ids = np.asarray(compact_ids, np.int32)
    _check_slots(ids, items, processor)
    for index, item in enumerate(items):
        _check_plan(index, item, vocab_size)
    ids = absorb_wrappers(ids, [item.plan for item in items], processor)
    ids, kept, truncation = fit_prompt(ids, [item.plan for item in items], processor, limit, truncate)
    items = [items[index] for index in kept]
    token_ids, starts = _expand(ids, items, processor)
    mm_mask, embed_mask = _masks(token_ids, starts, items, processor)
    placed = _place_items(items, starts, mm_mask, embed_mask)
    validate_mm_inputs(token_ids.size, [item.runs for item in placed])
    positions, delta = processor.positions(token_ids, [(item.start, item.plan) for item in placed])
    if positions.ndim != 2 or positions.shape[1] != token_ids.size:
        raise EngineError(f"positions of shape {list(positions.shape)} for {token_ids.size} tokens")
    keyed = all(item.cache_key is not None for item in placed)
    mm_input = _multimodal_input(placed) if placed and keyed else None
    return PreparedPrompt(
        token_ids=token_ids,
        positions=positions.astype(np.int32, copy=False),
        position_delta=int(delta),
        items=placed,
        mm_mask=mm_mask,
        embed_mask=embed_mask,
        cumsum=mm_embed_cumsum(embed_mask),
        multimodal_input=mm_input,
        vocab_size=vocab_size,
        # Items without identity would share KV with every other picture; a root of its own keeps the prompt apart.
        root=root_key(salt) if keyed else secrets.token_bytes(32),
        key_input=None if mm_input is None else _prefix_input(mm_input, placed),
        reusable=keyed,
        truncation=truncation,
    )


def _check_slots(ids: Int32[np.ndarray, "S"], items: Sequence[ItemInput], processor: Processor) -> None:
    slots = [modality for _, modality in placeholder_slots(ids, processor)]
    given = [item.plan.modality for item in items]
    for modality in Modality:
        if slots.count(modality) != given.count(modality):
            raise PlaceholderError(
                f"the prompt holds {slots.count(modality)} {modality} placeholders "
                f"for {given.count(modality)} {modality} items"
            )
    for index, (slot, modality) in enumerate(zip(slots, given, strict=True)):
        if slot != modality:
            raise PlaceholderError(f"its placeholder stands for {slot}, the item is {modality}", item=index)


def _check_plan(index: int, item: ItemInput, vocab_size: int) -> None:
    plan = item.plan
    slots = int(np.count_nonzero(plan.span_embed))
    if plan.span_embed.shape != plan.span_ids.shape:
        raise PlaceholderError(
            f"{plan.span_ids.size} span ids but {plan.span_embed.size} flags tell which take a row", item=index
        )
    if slots != plan.rows or slots == 0:
        raise PlaceholderError(f"{slots} prompt positions for {plan.rows} embedding rows", item=index)
    outside = [token for token in plan.span_ids[~plan.span_embed].tolist() if not 0 <= token < vocab_size]
    if outside:  # only rows free an id from the table
        raise PlaceholderError(
            f"id {outside[0]} of its span takes no row and lies outside the vocabulary of {vocab_size}", item=index
        )
    if item.embedding is not None and item.embedding.shape[0] != plan.rows:
        raise PlaceholderError(f"{item.embedding.shape[0]} supplied rows for {plan.rows} positions", item=index)


def _expand(
    ids: Int32[np.ndarray, "S"], items: Sequence[ItemInput], processor: Processor
) -> tuple[Int32[np.ndarray, "S"], list[int]]:
    """Expanded ids, and where each item's span starts."""
    pieces, starts, end, size = [], [], 0, 0
    for (slot, _), item in zip(placeholder_slots(ids, processor), items, strict=True):
        pieces += [ids[end:slot], item.plan.span_ids]
        size += slot - end
        starts.append(size)
        size += item.plan.span_ids.size
        end = slot + 1
    return np.concatenate([*pieces, ids[end:]]).astype(np.int32, copy=False), starts


def _masks(
    token_ids: Int32[np.ndarray, "S"], starts: Sequence[int], items: Sequence[ItemInput], processor: Processor
) -> tuple[Bool[np.ndarray, "S"], Bool[np.ndarray, "S"]]:
    """mm_mask and embed_mask by position: an id that looks like a placeholder elsewhere is ordinary text."""
    mm_mask, embed_mask = np.zeros(token_ids.size, bool), np.zeros(token_ids.size, bool)
    special = list(processor.special_ids)
    for start, item in zip(starts, items, strict=True):
        span = slice(start, start + item.plan.span_ids.size)
        embed_mask[span] = item.plan.span_embed
        mm_mask[span] = item.plan.span_embed | np.isin(item.plan.span_ids, special)
    return mm_mask, embed_mask


def _place_items(
    items: Sequence[ItemInput],
    starts: Sequence[int],
    mm_mask: Bool[np.ndarray, "S"],
    embed_mask: Bool[np.ndarray, "S"],
) -> list[PromptItem]:
    spans = [slice(start, start + item.plan.span_ids.size) for start, item in zip(starts, items, strict=True)]
    lengths = [int(np.count_nonzero(mm_mask[span])) for span in spans]
    offsets, run_positions, run_lengths = find_mm_token_runs_from_mask(mm_mask, lengths)
    placed = []
    for index, (item, span) in enumerate(zip(items, spans, strict=True)):
        runs = slice(offsets[index], offsets[index + 1])
        digest = None if item.digest is None else tuple(hexdigest_to_int32(item.digest))
        placed.append(
            PromptItem(
                index=index,
                modality=item.plan.modality,
                plan=item.plan,
                patches=item.patches,
                start=span.start,
                runs=list(zip(run_positions[runs], run_lengths[runs], strict=True)),
                digest=digest,
                cache_key=item.cache_key(),
                row_positions=(span.start + np.flatnonzero(embed_mask[span])).astype(np.int32),
                uuid=item.uuid,
                source=item.source,
                embedding=item.embedding,
            )
        )
    return placed


def _multimodal_input(items: Sequence[PromptItem]) -> MultimodalInput:
    uuids = [item.uuid for item in items]
    offsets = np.cumsum([0, *(len(item.runs) for item in items)]).tolist()
    return MultimodalInput(
        multimodal_hashes=[list(item.digest or ()) for item in items],
        multimodal_positions=[item.runs[0][0] for item in items],
        multimodal_lengths=[item.length for item in items],
        multimodal_uuids=uuids if any(uuid is not None for uuid in uuids) else None,
        multimodal_item_run_cu_offsets=offsets,
        multimodal_run_positions=[position for item in items for position, _ in item.runs],
        multimodal_run_lengths=[length for item in items for _, length in item.runs],
    )


def _prefix_input(mm_input: MultimodalInput, items: Sequence[PromptItem]) -> MultimodalInput:
    """The same items under digests that cover their options too, for KV keys."""
    hashes = [
        prefix_hash(words, item.cache_key[3])
        for words, item in zip(mm_input.multimodal_hashes, items, strict=True)
        if item.cache_key is not None
    ]
    return replace(mm_input, multimodal_hashes=hashes)
