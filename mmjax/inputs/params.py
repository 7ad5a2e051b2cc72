# SPDX-License-Identifier: Apache-2.0
"""What travels with a multimodal request: item identities and runs, payload, encoder metadata.

Field and key names are TensorRT-LLM's, so that both systems can be read side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmjax.inputs.items import Modality
from mmjax.inputs.runtime import MultimodalRuntimeData

MULTIMODAL_ENCODER_ITEM_METADATA_KEY = "multimodal_encoder_item_metadata"
MAX_INT32 = 2**31 - 1

# Entries that describe a request but carry nothing to encode.
METADATA_KEYS = frozenset(
    {
        "mrope_config",
        "multimodal_embed_mask_cumsum",
        "multimodal_embedding_lengths",
        MULTIMODAL_ENCODER_ITEM_METADATA_KEY,
        "special_token_offsets",
        "layout_metadata",
    }
)


def check_int_list(name: str, values: object, minimum: int | None = None) -> None:
    """Raises TypeError unless `values` is a list of Python ints, ValueError if one is below `minimum`."""
    if not isinstance(values, list):
        raise TypeError(f"{name} must be a list, got {type(values).__name__}")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must hold ints, got {type(value).__name__}")
        if minimum is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_runs(
    lengths: list[int],
    offsets: list[int] | None,
    positions: list[int] | None,
    run_lengths: list[int] | None,
) -> None:
    """Checks run metadata in CSR form against the items' lengths; the three lists come together or not at all."""
    given = [part is not None for part in (offsets, positions, run_lengths)]
    if not any(given):
        return
    if not all(given):
        raise ValueError("run offsets, run positions and run lengths must come together or not at all")
    check_int_list("multimodal_item_run_cu_offsets", offsets, 0)
    check_int_list("multimodal_run_positions", positions, 0)
    check_int_list("multimodal_run_lengths", run_lengths, 1)
    if len(positions) != len(run_lengths):
        raise ValueError(f"{len(positions)} run positions but {len(run_lengths)} run lengths")
    if len(offsets) != len(lengths) + 1:
        raise ValueError(f"{len(offsets)} run offsets for {len(lengths)} items, expected {len(lengths) + 1}")
    if offsets[0] != 0 or offsets[-1] != len(positions) or offsets != sorted(offsets):
        raise ValueError(f"run offsets {offsets} do not rise from 0 to {len(positions)} runs")
    for item, length in enumerate(lengths):
        end, total = -1, 0
        for run in range(offsets[item], offsets[item + 1]):
            if positions[run] < end:
                raise ValueError(f"item {item}: run at {positions[run]} overlaps the one that ends at {end}")
            end = positions[run] + run_lengths[run]
            total += run_lengths[run]
        if end > MAX_INT32:
            raise ValueError(f"item {item}: its runs end at {end}, beyond int32")
        if total != length:
            raise ValueError(f"item {item}: its runs hold {total} positions, its length is {length}")


@dataclass(frozen=True)
class MultimodalInput:
    """Identity and place of every item of a prompt, in prompt order.

    Attributes:
      multimodal_hashes: 8 signed int32 an item, its content digest.
      multimodal_positions: prompt index of the item's first position.
      multimodal_lengths: prompt positions of the item, specials included, text between its runs not.
      multimodal_uuids: names that callers gave to items, None for those without.
      multimodal_item_run_cu_offsets: item i owns runs [offsets[i], offsets[i + 1]).
      multimodal_run_positions, multimodal_run_lengths: the exact contiguous runs.

    Raises:
      TypeError: something other than lists of ints.
      ValueError: counts, signs or runs that contradict each other.
    """

    multimodal_hashes: list[list[int]]
    multimodal_positions: list[int]
    multimodal_lengths: list[int]
    multimodal_uuids: list[str | None] | None = None
    multimodal_item_run_cu_offsets: list[int] | None = None
    multimodal_run_positions: list[int] | None = None
    multimodal_run_lengths: list[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.multimodal_hashes, list):
            raise TypeError(f"multimodal_hashes must be a list, got {type(self.multimodal_hashes).__name__}")
        for entry in self.multimodal_hashes:
            check_int_list("multimodal_hashes", entry)
        check_int_list("multimodal_positions", self.multimodal_positions, 0)
        check_int_list("multimodal_lengths", self.multimodal_lengths, 1)
        items = len(self.multimodal_hashes)
        if len({len(entry) for entry in self.multimodal_hashes}) > 1:
            raise ValueError("the hashes of all items must have one length")
        if not items == len(self.multimodal_positions) == len(self.multimodal_lengths):
            raise ValueError(
                f"{items} hashes, {len(self.multimodal_positions)} positions and "
                f"{len(self.multimodal_lengths)} lengths do not describe the same items"
            )
        self._check_uuids(items)
        check_runs(
            self.multimodal_lengths,
            self.multimodal_item_run_cu_offsets,
            self.multimodal_run_positions,
            self.multimodal_run_lengths,
        )

    def _check_uuids(self, items: int) -> None:
        if self.multimodal_uuids is None:
            return
        if not isinstance(self.multimodal_uuids, list):
            raise TypeError(f"multimodal_uuids must be a list, got {type(self.multimodal_uuids).__name__}")
        if len(self.multimodal_uuids) != items:
            raise ValueError(f"{len(self.multimodal_uuids)} uuids for {items} items")
        if not all(uuid is None or isinstance(uuid, str) for uuid in self.multimodal_uuids):
            raise TypeError("multimodal_uuids must hold str or None")

    def item_runs(self, item: int) -> Iterator[tuple[int, int]]:
        """(position, length) of each run of `item`; its whole span when there is no run metadata."""
        if self.multimodal_item_run_cu_offsets is None:
            yield self.multimodal_positions[item], self.multimodal_lengths[item]
            return
        first, last = self.multimodal_item_run_cu_offsets[item : item + 2]
        yield from zip(self.multimodal_run_positions[first:last], self.multimodal_run_lengths[first:last], strict=True)


class MultimodalEncoderItemMetadata(NamedTuple):
    """What the item scheduler needs to know of each item, in prompt order."""

    item_refs: list[tuple[str, int]]  # (modality, index within that modality)
    encoder_token_lengths: list[int]  # attention tokens before merging
    output_embedding_lengths: list[int]  # embedding rows

    def validate(self) -> None:
        """Raises TypeError or ValueError unless the three lists describe the same items with positive costs."""
        if not isinstance(self.item_refs, list):
            raise TypeError(f"item_refs must be a list, got {type(self.item_refs).__name__}")
        check_int_list("encoder_token_lengths", self.encoder_token_lengths, 1)
        check_int_list("output_embedding_lengths", self.output_embedding_lengths, 1)
        sizes = [len(part) for part in self]
        if len(set(sizes)) != 1:
            raise ValueError(f"item metadata lists have different lengths {sizes}")


def get_encoder_item_metadata(data: Mapping[str, Any] | None) -> MultimodalEncoderItemMetadata | None:
    """The stored item metadata, None if there is none; TypeError for a wrong container or entry."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise TypeError(f"multimodal_data must be a dict, got {type(data).__name__}")
    metadata = data.get(MULTIMODAL_ENCODER_ITEM_METADATA_KEY)
    if metadata is not None and not isinstance(metadata, MultimodalEncoderItemMetadata):
        raise TypeError(f"item metadata must be MultimodalEncoderItemMetadata, got {type(metadata).__name__}")
    return metadata


def set_encoder_item_metadata(data: dict[str, Any], metadata: MultimodalEncoderItemMetadata | None) -> None:
    """Validates and stores item metadata and, with it, `multimodal_embedding_lengths`; None stores nothing.

    Raises:
      TypeError, ValueError: wrong type, or row counts that do not match those already stored.
    """
    if metadata is None:
        return
    if not isinstance(metadata, MultimodalEncoderItemMetadata):
        raise TypeError(f"item metadata must be MultimodalEncoderItemMetadata, got {type(metadata).__name__}")
    metadata.validate()
    rows = list(metadata.output_embedding_lengths)
    known = data.get("multimodal_embedding_lengths")
    if known is not None and list(known) != rows:
        raise ValueError(f"multimodal_embedding_lengths {list(known)} do not match item metadata {rows}")
    data[MULTIMODAL_ENCODER_ITEM_METADATA_KEY] = metadata
    data["multimodal_embedding_lengths"] = rows


@dataclass
class MultimodalParams:
    """One request in one step: identities, payload, and the part of the prompt that the step computes.

    Attributes:
      multimodal_data: payload and metadata by key, see `METADATA_KEYS`.
      multimodal_runtime: set for a step, None outside one.
      mm_item_order: {"modality", "index", "placeholder"} of every item in prompt order.
    """

    multimodal_input: MultimodalInput | None = None
    multimodal_data: dict[str, Any] = field(default_factory=dict)
    multimodal_runtime: MultimodalRuntimeData | None = None
    mm_item_order: list[dict[str, Any]] = field(default_factory=list)

    def has_content(self) -> bool:
        """Whether the request has anything multimodal at all."""
        return bool(self.multimodal_input) or bool(self.multimodal_data)

    def strip_for_generation(self) -> None:
        """Keeps only what decoding needs. The dict that others may hold is left as it was."""
        self.multimodal_data = dict(self.multimodal_data)
        strip_mm_data_for_generation(self.multimodal_data)


def has_mm_payload_keys(data: Mapping[str, Any]) -> bool:
    """Whether `data` carries something to encode or embed, not metadata alone."""
    return any(key not in METADATA_KEYS for key in data)


def strip_mm_data_for_generation(data: dict[str, Any]) -> None:
    """Empties `data` in place, except for the position delta that decoding adds."""
    deltas = (data.get("mrope_config") or {}).get("mrope_position_deltas")
    data.clear()
    if deltas is not None:
        data["mrope_config"] = {"mrope_position_deltas": deltas}


def strip_mm_encoder_inputs(data: dict[str, Any]) -> None:
    """Drops pixels and samples in place, once every item is encoded."""
    for modality in Modality:
        data.pop(modality.value, None)
