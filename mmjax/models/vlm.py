# SPDX-License-Identifier: Apache-2.0
"""Config of a model with a tower and a decoder: what the engine asks of it, answered from the two parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class TextConfig(Protocol):
    """What a decoder's frozen config tells `VLMConfig`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    position_axes: int
    max_position_embeddings: int
    deepstack_layers: tuple[int, ...]  # after which a level of an embedding row is added


class TowerConfig(Protocol):
    """What a tower's frozen config tells `VLMConfig`."""

    head_dim: int
    merge: int  # patches along one side of a block that makes one embedding row
    patch_values: int  # uint8 values of one patch


@dataclass(frozen=True)
class VLMConfig:
    """The part of `ModelConfig` that follows from the decoder and the tower; families say what these are."""

    text: TextConfig
    vision: TowerConfig
    dtype: str

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.text.hidden_size

    @property
    def row_width(self) -> int:
        return self.text.hidden_size * (1 + len(self.text.deepstack_layers))

    @property
    def num_layers(self) -> int:
        return self.text.num_layers

    @property
    def num_heads(self) -> int:
        return self.text.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.text.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.text.head_dim

    @property
    def position_axes(self) -> int:
        return self.text.position_axes

    @property
    def max_position_embeddings(self) -> int:
        return self.text.max_position_embeddings

    @property
    def vision_head_dim(self) -> int:
        return self.vision.head_dim

    @property
    def merge(self) -> int:
        """Patches that make one embedding row."""
        return self.vision.merge**2

    @property
    def patch_values(self) -> int:
        return self.vision.patch_values

    @property
    def window_capacity(self) -> int:
        return 0


def deepstack_layers(cfg: VLMConfig) -> tuple[int, ...]:
    """Decoder layers after which level 0, 1, ... of the embedding rows is added."""
    return cfg.text.deepstack_layers
