# SPDX-License-Identifier: Apache-2.0
"""The two forms of a prompt with items: compact (one placeholder an item) and expanded (every position spelled out)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Int, Int32

from mmjax.errors import PlaceholderError, RequestError
from mmjax.inputs.items import ItemPlan, Modality
from mmjax.models.family import Processor

ItemRef: TypeAlias = tuple[Modality, int]  # modality and index among the items of that modality


def compact_prompt(
    token_ids: Int[np.ndarray, "S"] | Sequence[int],
    plans: Mapping[Modality, Sequence[ItemPlan]],
    processor: Processor,
) -> tuple[Int32[np.ndarray, "S"], list[ItemRef]]:
    """The compact form of a prompt given in either form, and its items in prompt order.

    Args:
      plans: the items of each modality, in the order of their placeholders.

    Raises:
      RequestError: a modality that the model does not take.
      PlaceholderError: neither one placeholder an item nor exactly the items' spans.
    """
    ids = np.asarray(token_ids, np.int64)
    if ids.ndim != 1:
        raise RequestError(f"a prompt is one list of token ids, got shape {list(ids.shape)}")
    for modality, items in plans.items():
        if items and modality not in processor.placeholder_id:
            raise RequestError(f"this model takes no {modality}")
    # First, since items of one row each have as many placeholders in one form as in the other.
    collapsed = _collapse(ids, plans, processor)
    if collapsed is not None:
        return collapsed
    slots = placeholder_slots(ids, processor)
    found = Counter(modality for _, modality in slots)
    if any(found[modality] != len(plans.get(modality, ())) for modality in processor.placeholder_id):
        raise _count_error(ids, found, plans)
    counters: Counter[Modality] = Counter()
    order = []
    for _, modality in slots:
        order.append((modality, counters[modality]))
        counters[modality] += 1
    return ids.astype(np.int32), order


def placeholder_slots(ids: Int[np.ndarray, "S"], processor: Processor) -> list[tuple[int, Modality]]:
    """(position, modality) of every placeholder id, in order."""
    slots = [
        (int(position), modality)
        for modality, token in processor.placeholder_id.items()
        for position in np.flatnonzero(ids == token)
    ]
    return sorted(slots)


def absorb_wrappers(
    ids: Int32[np.ndarray, "S"], plans: Sequence[ItemPlan], processor: Processor
) -> Int32[np.ndarray, "S"]:
    """A compact prompt without the ids around placeholders that the items' spans stand for, see `ItemPlan.absorbs`.

    Args:
      plans: one an item, in prompt order; there are as many placeholders.
    """
    keep = np.ones(len(ids), bool)
    for (slot, _), plan in zip(placeholder_slots(ids, processor), plans, strict=True):
        around = [slot - 1, slot + 1]
        inside = slot > 0 and slot + 1 < len(ids) and keep[slot - 1]
        if plan.absorbs is not None and inside and tuple(ids[around]) == plan.absorbs:
            keep[around] = False
    return ids[keep]


def _marker(plan: ItemPlan) -> tuple[int, int]:
    """Offset and id of the first position of a span that takes a row."""
    offset = int(np.argmax(plan.span_embed))
    return offset, int(plan.span_ids[offset])


def _collapse(
    ids: Int[np.ndarray, "S"], plans: Mapping[Modality, Sequence[ItemPlan]], processor: Processor
) -> tuple[Int32[np.ndarray, "S"], list[ItemRef]] | None:
    """Swaps every span for its placeholder; None unless all rows of the prompt belong to exactly the given items."""
    markers = {_marker(plan)[1] for items in plans.values() for plan in items}
    pieces, order, end = [], [], 0
    used: Counter[Modality] = Counter()
    for position in np.flatnonzero(np.isin(ids, list(markers))).tolist():
        if position < end:
            continue
        for modality, items in plans.items():
            if used[modality] == len(items):
                continue
            plan = items[used[modality]]
            start = position - _marker(plan)[0]
            stop = start + plan.span_ids.size
            if start >= end and np.array_equal(ids[start:stop], plan.span_ids):
                break
        else:
            return None
        pieces += [ids[end:start], [processor.placeholder_id[modality]]]
        order.append((modality, used[modality]))
        used[modality] += 1
        end = stop
    compact = np.concatenate([*pieces, ids[end:]]).astype(np.int32)
    complete = all(used[modality] == len(items) for modality, items in plans.items())
    if not complete or len(placeholder_slots(compact, processor)) != len(order):
        return None
    return compact, order


def _count_error(
    ids: Int[np.ndarray, "S"], found: Counter[Modality], plans: Mapping[Modality, Sequence[ItemPlan]]
) -> PlaceholderError:
    """Names the first modality whose placeholders are not one an item."""
    modality = next(modality for modality in Modality if found[modality] != len(plans.get(modality, ())))
    items = plans.get(modality, ())
    markers = {_marker(plan)[1] for plan in items}
    slots = max(found[modality], int(np.isin(ids, list(markers)).sum()))
    text = f"the prompt holds {slots} {modality} placeholders for {len(items)} items"
    if items:
        rows = sum(plan.rows for plan in items)
        text += f"; expected {len(items)}, or the items' whole spans with {rows} in all"
    return PlaceholderError(text)
