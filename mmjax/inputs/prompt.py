# SPDX-License-Identifier: Apache-2.0
"""A prompt with its items in place: the records that `prepare_prompt` makes and the engine lives by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int32, Int64, UInt8

from mmjax.inputs.hashing import hexdigest_to_int32, mm_processor_kwargs_hash
from mmjax.inputs.items import ItemPlan, Modality, VideoMetadata
from mmjax.inputs.kv_key import KeyToken, augment_tokens_for_block_reuse, block_keys
from mmjax.inputs.params import (
    MultimodalEncoderItemMetadata,
    MultimodalInput,
    MultimodalParams,
    set_encoder_item_metadata,
)
from mmjax.inputs.runtime import MultimodalRuntimeData
from mmjax.inputs.truncate import Truncation
from mmjax.inputs.usage import Usage

CacheKey: TypeAlias = tuple[str, tuple[int, ...], int, str]  # modality, content digest, rows, hash of the options


@dataclass(frozen=True, eq=False)
class ItemInput:
    """An item on its way into a prompt. With a plan alone a prompt can be counted and explained, not run.

    Attributes:
      patches: uint8 pixels in patches; None for plans, for supplied embeddings, and where its rows are known already.
      digest: content digest in hex; None means that nothing of this item may be reused.
      uuid: the caller's name for it (already part of the digest).
      source: what it can be decoded from again.
      embedding: rows supplied by the caller in place of pixels.
      clip: of a clip, what decoding found; None before that.
    """

    plan: ItemPlan
    patches: UInt8[np.ndarray, "P values"] | None = None
    digest: str | None = None
    uuid: str | None = None
    source: Any = None
    embedding: Float[np.ndarray, "R width"] | None = None
    clip: VideoMetadata | None = None

    def cache_key(self) -> CacheKey | None:
        """What names its rows; None if the item or its options have no identity: then nothing of it is shared."""
        options: dict[str, Any] = self.plan.options
        if self.embedding is not None:
            options = {"embedding": True, "grid": self.plan.grid, "options": options}
        options_hash = mm_processor_kwargs_hash(options)
        if self.digest is None or options_hash is None:
            return None
        return self.plan.modality.value, tuple(hexdigest_to_int32(self.digest)), self.plan.rows, options_hash


class ItemPart(NamedTuple):
    """Patches [begin, end) of the item that a caller knows as number `item`."""

    item: int
    begin: int
    end: int


@dataclass(eq=False)
class PromptItem:
    """An item in its place.

    Attributes:
      index: in prompt order.
      part: where it comes from, in a prompt whose items were cut (see `parts`).
      start: prompt position of the first token of its span.
      runs: (position, length) of the positions that belong to it; text inside its span does not.
      digest: 8 signed int32, None if unknown.
      cache_key: names its encoder output; None if it must not be shared.
      row_positions: prompt positions that take its rows, in order.
    """

    index: int
    modality: Modality
    plan: ItemPlan
    patches: UInt8[np.ndarray, "P values"] | None
    start: int
    runs: list[tuple[int, int]]
    digest: tuple[int, ...] | None
    cache_key: CacheKey | None
    row_positions: Int32[np.ndarray, "rows"]
    uuid: str | None = None
    source: Any = None
    embedding: Float[np.ndarray, "R width"] | None = None
    part: ItemPart | None = None

    @property
    def number(self) -> int:
        """Which of the caller's items it is, or is a part of."""
        return self.index if self.part is None else self.part.item

    @property
    def end(self) -> int:
        """One past the last token of its span."""
        return self.start + self.plan.span_ids.size

    @property
    def length(self) -> int:
        """Prompt positions that belong to it, special tokens included."""
        return sum(length for _, length in self.runs)


@dataclass(eq=False)
class PreparedPrompt:
    """A prompt ready for the engine.

    Attributes:
      token_ids: int32 [S], expanded.
      positions: int32 [axes, S] rotary positions; `position_delta` is what decoding adds to a plain position.
      mm_mask: positions that belong to items; embed_mask: those that take a row; cumsum: running count of the latter.
      multimodal_input: items' identities and runs; None without items, or if one has no digest.
      truncation: what was dropped to fit, None if nothing was.
      reusable: whether its KV may be shared with other requests.
    """

    token_ids: Int32[np.ndarray, "S"]
    positions: Int32[np.ndarray, "A S"]
    position_delta: int
    items: list[PromptItem]
    mm_mask: Bool[np.ndarray, "S"]
    embed_mask: Bool[np.ndarray, "S"]
    cumsum: Int64[np.ndarray, "S"]
    multimodal_input: MultimodalInput | None
    vocab_size: int
    root: bytes = field(repr=False)
    key_input: MultimodalInput | None = field(repr=False)
    reusable: bool = True
    truncation: Truncation | None = None

    @property
    def usage(self) -> Usage:
        """Exact prompt counts by kind."""
        counts = dict.fromkeys(Modality, 0)
        for item in self.items:
            counts[item.modality] += item.length
        return Usage(
            text_tokens=self.token_ids.size - sum(counts.values()),
            image_tokens=counts[Modality.IMAGE],
            video_tokens=counts[Modality.VIDEO],
            audio_tokens=counts[Modality.AUDIO],
        )

    @property
    def warnings(self) -> list[str]:
        """Remarks for the caller: on items, and on what was dropped to fit."""
        remarks = [f"item {item.number}: {text}" for item in self.items for text in item.plan.warnings]
        return remarks if self.truncation is None else [*remarks, str(self.truncation)]

    def runtime(self, past: int, end: int) -> MultimodalRuntimeData:
        """Row accounting of the chunk [past, end)."""
        return MultimodalRuntimeData(past, end, self.cumsum)

    def key_tokens(self, start: int = 0, end: int | None = None) -> list[KeyToken]:
        """What stands for the prompt positions [start, end) in KV block keys."""
        return augment_tokens_for_block_reuse(self.token_ids.tolist(), self.key_input, self.vocab_size, start, end)

    def block_keys(self, tokens_per_block: int) -> list[bytes]:
        """Keys of the prompt's full KV blocks. Longer sequences go on from the last with `kv_key.block_key`."""
        return block_keys(self.key_tokens(), tokens_per_block, self.root)

    def encoder_item_metadata(self) -> MultimodalEncoderItemMetadata:
        """Costs and rows of all items."""
        return MultimodalEncoderItemMetadata(
            item_refs=_item_refs([item.modality for item in self.items]),
            encoder_token_lengths=[item.plan.encoder_tokens for item in self.items],
            output_embedding_lengths=[item.plan.rows for item in self.items],
        )

    def multimodal_params(self, past: int | None = None, end: int | None = None) -> MultimodalParams:
        """The request as `MultimodalParams`, with row accounting if a chunk [past, end) is named."""
        data: dict[str, Any] = {}
        for item in self.items:
            if item.patches is not None:
                group = data.setdefault(item.modality.value, {"pixel_values": [], "grid_thw": []})
                group["pixel_values"].append(item.patches)
                group["grid_thw"].append(item.plan.grid)
        if self.items:
            data["multimodal_embed_mask_cumsum"] = self.cumsum
            data["special_token_offsets"] = np.flatnonzero(~self.embed_mask[self.mm_mask]).tolist()
            set_encoder_item_metadata(data, self.encoder_item_metadata())
        if self.positions.shape[0] > 1:
            data["mrope_config"] = {
                "mrope_position_ids": self.positions[:, None, :],
                "mrope_position_deltas": np.full((1, 1), self.position_delta, np.int32),
            }
        order = [
            {"modality": modality, "index": index, "placeholder": None}
            for modality, index in _item_refs([item.modality for item in self.items])
        ]
        runtime = None if past is None or end is None else self.runtime(past, end)
        return MultimodalParams(self.multimodal_input, data, runtime, order)


def _item_refs(modalities: Sequence[Modality]) -> list[tuple[str, int]]:
    """(modality, index within it) of items in prompt order."""
    return [(modality.value, modalities[:index].count(modality)) for index, modality in enumerate(modalities)]
