# SPDX-License-Identifier: Apache-2.0
"""What a prefill worker is told of a prompt whose items were encoded elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.inputs.params import MultimodalInput, check_int_list, check_runs


@dataclass(frozen=True)
class DisaggPrefillMultimodalInputs:
    """The expanded prompt and the place of every item in it, without contents.

    Attributes:
      prompt_token_ids: expanded.
      multimodal_lengths: prompt positions an item, specials included; `multimodal_embedding_lengths` are its rows.
      special_token_offsets: which of all item positions, counted without the text, keep a text embedding.
      item_types: one small integer an item, 0 image, 1 video.

    Raises:
      TypeError: something other than lists of ints.
      ValueError: counts, signs or runs that contradict each other.
    """

    prompt_token_ids: list[int]
    multimodal_lengths: list[int]
    multimodal_positions: list[int]
    multimodal_embedding_lengths: list[int]
    multimodal_item_run_cu_offsets: list[int]
    multimodal_run_positions: list[int]
    multimodal_run_lengths: list[int]
    special_token_offsets: list[int]
    item_types: list[int]

    def __post_init__(self) -> None:
        check_int_list("prompt_token_ids", self.prompt_token_ids)
        check_int_list("multimodal_embedding_lengths", self.multimodal_embedding_lengths, 1)
        check_int_list("multimodal_lengths", self.multimodal_lengths, 1)
        check_int_list("multimodal_positions", self.multimodal_positions, 0)
        check_int_list("special_token_offsets", self.special_token_offsets, 0)
        check_int_list("item_types", self.item_types, 0)
        items = len(self.multimodal_embedding_lengths)
        for name in ("multimodal_lengths", "multimodal_positions", "item_types"):
            if len(getattr(self, name)) != items:
                raise ValueError(f"{len(getattr(self, name))} {name} for {items} items")
        check_runs(
            self.multimodal_lengths,
            self.multimodal_item_run_cu_offsets,
            self.multimodal_run_positions,
            self.multimodal_run_lengths,
        )

    def to_multimodal_input(self, hashes: list[list[int]]) -> MultimodalInput:
        """The same items under the digests that came with their embeddings."""
        return MultimodalInput(
            multimodal_hashes=hashes,
            multimodal_positions=self.multimodal_positions,
            multimodal_lengths=self.multimodal_lengths,
            multimodal_item_run_cu_offsets=self.multimodal_item_run_cu_offsets,
            multimodal_run_positions=self.multimodal_run_positions,
            multimodal_run_lengths=self.multimodal_run_lengths,
        )
