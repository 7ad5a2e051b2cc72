# SPDX-License-Identifier: Apache-2.0
"""Clips that no encoder call or row pool could hold at once, cut between temporal steps into items of their own.

Patches of different steps never see each other in a tower (each step is an attention context), so rows stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float32

from mmjax.inputs.items import ItemPlan, Modality
from mmjax.inputs.prompt import CacheKey, ItemPart, PreparedPrompt, PromptItem

Fits = Callable[[ItemPlan], bool]


def in_parts(prompt: PreparedPrompt, fits: Fits) -> PreparedPrompt:
    """The prompt with every clip that does not fit in as few parts as possible; what can't be cut stays whole.

    Only `items` change. Ids, positions, and the identity of the prompt's KV are those of the whole clips. A prompt that
    was cut is not cut again.
    """
    if any(item.part is not None for item in prompt.items):
        return prompt
    if all(item.modality is not Modality.VIDEO or fits(item.plan) for item in prompt.items):
        return prompt
    pieces = [piece for item in prompt.items for piece in _cut(item, fits)]
    return replace(prompt, items=[replace(piece, index=index) for index, piece in enumerate(pieces)])


def join_rows(prompt: PreparedPrompt, rows: Sequence[Float32[np.ndarray, "R width"]]) -> list[np.ndarray]:
    """Rows by part as rows by item."""
    if all(item.part is None for item in prompt.items):
        return list(rows)
    groups: dict[int, list[np.ndarray]] = {}
    for item, part in zip(prompt.items, rows, strict=True):
        groups.setdefault(item.number, []).append(part)
    return [np.concatenate(group) for group in groups.values()]


def _cut(item: PromptItem, fits: Fits) -> list[PromptItem]:
    """The item's parts, numbered by the item."""
    plan, steps = item.plan, item.plan.grid[0]
    whole = replace(item, part=ItemPart(item.index, 0, plan.encoder_tokens))
    alike = len(set(plan.contexts)) == 1 and len(plan.contexts) == steps and plan.rows % steps == 0
    if item.modality is not Modality.VIDEO or fits(plan) or not alike:
        return [whole]
    sizes = [size for size in range(steps - 1, 0, -1) if fits(_steps(plan, size))]
    if not sizes:
        return [whole]
    return [_part(item, begin, min(begin + sizes[0], steps)) for begin in range(0, steps, sizes[0])]


def _steps(plan: ItemPlan, count: int) -> ItemPlan:
    """The costs of `count` steps of a clip."""
    steps = plan.grid[0]
    return replace(
        plan,
        grid=(count, *plan.grid[1:]),
        rows=plan.rows // steps * count,
        contexts=plan.contexts[:count],
        windows=plan.windows // steps * count,
    )


def _part(item: PromptItem, begin: int, end: int) -> PromptItem:
    """Temporal steps [begin, end) of a clip, with the prompt positions up to the next step's first row."""
    plan, steps = item.plan, item.plan.grid[0]
    rows, patches = plan.rows // steps, plan.contexts[0]
    first = item.start if begin == 0 else int(item.row_positions[begin * rows])
    last = item.end if end == steps else int(item.row_positions[end * rows])
    span, place = slice(first - item.start, last - item.start), slice(begin * patches, end * patches)
    part_plan = replace(
        _steps(plan, end - begin),
        span_ids=plan.span_ids[span],
        span_embed=plan.span_embed[span],
        warnings=plan.warnings if begin == 0 else (),
    )
    clipped = [(max(at, first), min(at + length, last)) for at, length in item.runs]
    taken = slice(begin * rows, end * rows)
    return replace(
        item,
        plan=part_plan,
        patches=None if item.patches is None else item.patches[place],
        start=first,
        runs=[(at, stop - at) for at, stop in clipped if at < stop],
        cache_key=_key(item.cache_key, part_plan.rows, begin, steps),
        row_positions=item.row_positions[taken],
        embedding=None if item.embedding is None else item.embedding[taken],
        part=ItemPart(item.index, place.start, place.stop),
    )


def _key(key: CacheKey | None, rows: int, begin: int, steps: int) -> CacheKey | None:
    """Equal parts of equal clips share rows; no part shares with a whole item."""
    if key is None:
        return None
    modality, digest, _, options = key
    return modality, digest, rows, f"{options} from step {begin} of {steps}"
