# SPDX-License-Identifier: Apache-2.0
"""The order of items in a prompt when payloads are grouped by modality: `mm_item_order` manifests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.inputs.items import Modality

ItemOrder = list[dict[str, Any]]


def derive_mm_item_order(
    text: str, image_placeholder: str | None = None, video_placeholder: str | None = None
) -> ItemOrder:
    """Reads the order of images and videos off a prompt's text; placeholders are taken literally."""
    modality_of = {
        placeholder: modality.value
        for placeholder, modality in ((image_placeholder, Modality.IMAGE), (video_placeholder, Modality.VIDEO))
        if placeholder
    }
    if not modality_of:
        return []
    counts: Counter[str] = Counter()
    order = []
    for match in re.finditer("|".join(re.escape(placeholder) for placeholder in modality_of), text):
        modality = modality_of[match.group()]
        order.append({"modality": modality, "index": counts[modality], "placeholder": match.group()})
        counts[modality] += 1
    return order


def default_mm_item_order(counts: Mapping[str, int]) -> ItemOrder:
    """Modality after modality, as the mapping lists them; right only where one modality is present."""
    return [
        {"modality": modality, "index": index, "placeholder": None}
        for modality, count in counts.items()
        for index in range(count)
    ]


def validate_mm_item_order(order: ItemOrder, counts: Mapping[str, int]) -> None:
    """Raises ValueError unless `order` names each item of each modality exactly once."""
    seen = set()
    for entry in order:
        key = (entry["modality"], entry["index"])
        if entry["modality"] not in counts:
            raise ValueError(f"item order names modality {entry['modality']!r}, which has no items")
        if not 0 <= entry["index"] < counts[entry["modality"]]:
            raise ValueError(f"item order names {key}, but there are {counts[entry['modality']]} of them")
        if key in seen:
            raise ValueError(f"item order names {key} twice")
        seen.add(key)
    if len(seen) != sum(counts.values()):
        raise ValueError(f"item order covers {len(seen)} of {sum(counts.values())} items")


def flatten_by_item_order(values: Mapping[str, Sequence[Any]], order: ItemOrder) -> list[Any]:
    """Per-modality values as one list in prompt order."""
    validate_mm_item_order(order, {modality: len(entries) for modality, entries in values.items()})
    return [values[entry["modality"]][entry["index"]] for entry in order]
