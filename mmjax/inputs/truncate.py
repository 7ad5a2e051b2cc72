# SPDX-License-Identifier: Apache-2.0
"""Shortening a prompt without ever cutting an item: whole items go, with the tokens that wrap them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int32

from mmjax.errors import ConfigError, PromptTooLongError
from mmjax.inputs.items import ItemPlan, Modality
from mmjax.inputs.prompt_forms import placeholder_slots
from mmjax.models.family import Processor

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Truncation:
    """What was dropped to make a prompt fit.

    Attributes:
      needed_tokens, kept_tokens: expanded prompt lengths before and after; `limit` lies between them.
      dropped_items: (index in the untruncated prompt, modality).
    """

    side: Side
    limit: int
    needed_tokens: int
    kept_tokens: int
    dropped_items: tuple[tuple[int, Modality], ...]

    def __str__(self) -> str:
        dropped = ", ".join(f"{modality} {index}" for index, modality in self.dropped_items) or "no item"
        return f"truncated from the {self.side}: {self.needed_tokens} to {self.kept_tokens} tokens, dropped {dropped}"


def fit_prompt(
    compact_ids: Int32[np.ndarray, "S"],
    plans: Sequence[ItemPlan],
    processor: Processor,
    limit: int | None,
    truncate: Side | None = None,
) -> tuple[Int32[np.ndarray, "S"], range, Truncation | None]:
    """Compact ids that expand to at most `limit` tokens, the indices of the items kept, and a report.

    Args:
      plans: one an item, in prompt order; there are as many placeholders.
      truncate: which end to drop tokens from; None refuses.

    Raises:
      PromptTooLongError: too long and `truncate` is None, or nothing would be left.
      ConfigError: an unknown `truncate`.
    """
    if truncate not in (None, "left", "right"):
        raise ConfigError(f"truncate must be None, 'left' or 'right', got {truncate!r}")
    needed = compact_ids.size + sum(plan.span_ids.size - 1 for plan in plans)
    if limit is None or needed <= limit:
        return compact_ids, range(len(plans)), None
    if truncate is None:
        raise PromptTooLongError(
            f"the prompt needs {needed} tokens, the limit is {limit}; "
            "truncate='left' or 'right' drops text and whole items"
        )
    atoms = _atoms(compact_ids, plans, processor)
    kept = _keep(atoms if truncate == "right" else atoms[::-1], limit)
    if not kept:
        raise PromptTooLongError(f"the prompt needs {needed} tokens and nothing whole of it fits a limit of {limit}")
    first, last = min(kept), max(kept)
    start, stop = atoms[first].start, atoms[last].stop
    items = [atom.item for atom in atoms[first : last + 1] if atom.item is not None]
    keep_items = range(items[0], items[-1] + 1) if items else range(0)
    report = Truncation(
        side=truncate,
        limit=limit,
        needed_tokens=needed,
        kept_tokens=sum(atom.tokens for atom in atoms[first : last + 1]),
        dropped_items=tuple((index, plan.modality) for index, plan in enumerate(plans) if index not in keep_items),
    )
    return compact_ids[start:stop], keep_items, report


@dataclass(frozen=True)
class _Atom:
    """What is kept or dropped as one: a text token, or an item with its wrapper tokens."""

    index: int
    start: int  # in the compact prompt
    stop: int
    tokens: int  # in the expanded prompt
    item: int | None


def _keep(atoms: Sequence[_Atom], limit: int) -> list[int]:
    """Indices of the leading atoms that fit together."""
    sizes = np.cumsum([atom.tokens for atom in atoms])
    return [atom.index for atom in atoms[: int(np.searchsorted(sizes, limit, side="right"))]]


def _atoms(ids: Int32[np.ndarray, "S"], plans: Sequence[ItemPlan], processor: Processor) -> list[_Atom]:
    slots = [position for position, _ in placeholder_slots(ids, processor)]
    owner = {}
    for item, (start, stop) in enumerate(_wrapped(ids, slots, processor)):
        owner[start] = (item, stop)
    atoms, position = [], 0
    while position < ids.size:
        item, stop = owner.get(position, (None, position + 1))
        extra = 0 if item is None else plans[item].span_ids.size - 1
        atoms.append(_Atom(len(atoms), position, stop, stop - position + extra, item))
        position = stop
    return atoms


def _wrapped(ids: Int32[np.ndarray, "S"], slots: Sequence[int], processor: Processor) -> list[tuple[int, int]]:
    """Each placeholder's range with the item-only tokens around it (`<|vision_start|>`, `<|vision_end|>`).

    Tokens between two neighbours are shared out: the first half closes the one, the rest opens the other.
    """
    wrappers = (set(processor.never_sampled) | set(processor.special_ids)) - set(processor.placeholder_id.values())
    is_wrapper = np.isin(ids, list(wrappers))
    ranges, floor = [], 0
    for index, slot in enumerate(slots):
        start, stop = slot, slot + 1
        while start > floor and is_wrapper[start - 1]:
            start -= 1
        while stop < ids.size and is_wrapper[stop]:
            stop += 1
        if index + 1 < len(slots) and stop == slots[index + 1]:
            stop = slot + 1 + (stop - slot - 1) // 2
        ranges.append((start, stop))
        floor = stop
    return ranges
