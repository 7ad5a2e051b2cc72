# SPDX-License-Identifier: Apache-2.0
"""What a model family is to the rest of mmjax: one `Family` record and one `Processor`.

The engine, the encoder plane and the converter know families through this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from mmjax.inputs.items import EncoderBucket, ItemPlan, Modality, ProcessedItem, VideoMetadata


class ModelConfig(Protocol):
    """What every family's frozen config offers the engine (hashable: it is a static argument of jit)."""

    dtype: str  # compute and weight dtype, "float32" or "bfloat16"
    vocab_size: int
    hidden_size: int  # E, width of the text model
    row_width: int  # E * (1 + deepstack levels), width of one embedding row
    num_layers: int  # L, text layers
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # D of the text model
    vision_head_dim: int  # D of the tower
    position_axes: int  # 3 with mRoPE, else 1
    max_position_embeddings: int
    merge: int  # vision patches per embedding row
    patch_values: int  # uint8 values of one patch
    window_capacity: int  # most patches of a window, 0 if the family has no windows


@dataclass(frozen=True)
class Weight:
    """One leaf of our parameter tree and the checkpoint tensors it is made of.

    `sources` are joined along axis 0 (fused qkv, gate and up); with `stack` they are templates with `{i}`, expanded for
    i in range(stack) and stacked along a new axis 0. `pad_to` pads each source with zeros: {axis: size}.
    `shape` reshapes a single source (a convolution kernel read as a matrix). With `transposed` the leaf holds all that
    with its last two axes swapped.
    `source_shapes` holds one shape a source, as the checkpoint stores it. Loading checks against it (padding would
    hide a wrong width), and export needs it to split, unpad and reshape a leaf again.
    """

    path: str  # "text.layers.3.qkv"
    sources: tuple[str, ...]  # canonical checkpoint names
    source_shapes: tuple[tuple[int, ...], ...]
    stack: int = 0
    pad_to: tuple[tuple[int, int], ...] = ()
    shape: tuple[int, ...] | None = None
    transposed: bool = False


class Processor(Protocol):
    """Host side of a family: pixels in, patches, grids, placeholder ids and positions out. numpy only.

    Optional: `duration_mark` (`inputs.clip_durations`), what the chat template writes for the seconds of a clip;
    `worst_contexts(tokens)` and `max_rows(tokens)`, bounds that the sizes of encoder buckets follow from
    (`encoder.budgets`).
    """

    placeholder_text: Mapping[Modality, str]  # the one token in the chat template that stands for an item
    placeholder_id: Mapping[Modality, int]
    special_ids: Sequence[int]  # ids that belong to an item's span but keep their text embedding
    never_sampled: Sequence[int]  # ids that only items may bring into a context

    def resolve(self, modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
        """Every processor option with its value, defaults spelled out. Unknown names raise RequestError."""

    def plan_image(self, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan: ...

    def sample_frames(self, metadata: VideoMetadata, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Which of `metadata.frames_indices` the model is to see, in order; `video` takes these, or the whole clip."""

    def plan_video(self, metadata: VideoMetadata, height: int, width: int, options: Mapping[str, Any]) -> ItemPlan: ...

    def image(self, rgb: UInt8[np.ndarray, "height width 3"], options: Mapping[str, Any]) -> ProcessedItem: ...

    def video(
        self, frames: UInt8[np.ndarray, "frames height width 3"], metadata: VideoMetadata, options: Mapping[str, Any]
    ) -> ProcessedItem: ...

    def positions(
        self, token_ids: Int32[np.ndarray, "S"], spans: Sequence[tuple[int, ItemPlan]]
    ) -> tuple[Int32[np.ndarray, "A S"], int]:
        """Rotary positions of the whole expanded prompt, one row an axis, and the delta that decoding adds."""

    def max_tokens_per_item(self) -> dict[Modality, int]:
        """Encoder tokens (before merging) of the largest item each modality admits."""

    def worst_windows(self, total_tokens: int) -> int:
        """Window rows that legal items of `total_tokens` patches in all may need at most."""

    def pixel_table(self) -> Float32[np.ndarray, "C 256"]:
        """The normalised value of every byte, exactly as the reference computes it."""

    def pack(self, items: Sequence[ProcessedItem], bucket: EncoderBucket) -> Any:
        """The family's `VisionInputs` of freshly made numpy arrays, padded to `bucket`."""


def _keys_and_values(cfg: ModelConfig) -> tuple[tuple[int, int, int], ...]:
    """A key and a value of every KV head."""
    return ((2, cfg.num_kv_heads, cfg.head_dim),) * cfg.num_layers


def _no_other_layouts(cfg: ModelConfig) -> tuple[tuple[Weight, ...], ...]:
    return ()


@dataclass(frozen=True)
class About:
    """What can't be read off a family's code.

    Attributes:
      title: its name as its makers spell it.
      lacks: what its checkpoints may have or ask for that is not supported.
      remarks: anything else that users should know.
    """

    title: str
    lacks: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A model family. `params` trees are nested dicts and lists of arrays; functions are pure."""

    name: str
    model_types: tuple[str, ...]  # values of config.json's "model_type"
    config: Callable[[dict], ModelConfig]
    spec: Callable[[ModelConfig], dict]  # tree of jax.ShapeDtypeStruct: {"vision": ..., "text": ...}
    weights: Callable[[ModelConfig], tuple[Weight, ...]]
    canonical_name: Callable[[str], str]  # maps every known checkpoint layout to the names in `weights`
    vision_inputs: Callable[[ModelConfig, EncoderBucket], Any]  # ShapeDtypeStructs of what `Processor.pack` returns
    encode: Callable[..., Any]  # (vision_params, cfg, inputs, pixel_table, ops) -> rows [R, row_width]
    embed: Callable[..., Any]  # (text_params, cfg, ids [T]) -> [T, E]
    # (text_params, cfg, hidden, positions, kv, meta, attend, deepstack=None, tokens=None) -> hidden, kv
    # `tokens` is a `layers.fusion.StepTokens`: the ids behind the hidden states, and which positions hold rows.
    forward: Callable[..., Any]
    layer_outputs: Callable[..., Any]  # arguments of forward -> [input and output of every layer, before the norm], kv
    logits: Callable[..., Any]  # (text_params, cfg, hidden [B, E]) -> float32 [B, V]
    processor: Callable[[ModelConfig, Path], Processor]
    deepstack_layers: Callable[[ModelConfig], tuple[int, ...]]  # text layers after which level k is added
    # Tables of other shapes under the same names, for checkpoints stored so; a checkpoint follows one table throughout.
    other_layouts: Callable[[ModelConfig], tuple[tuple[Weight, ...], ...]] = _no_other_layouts
    # Whether settings of the processor lie in files of their own; else config.json has them all.
    processor_files: bool = True
    # What a token leaves in the pages of each layer, (parts, heads, width).
    state_shapes: Callable[[ModelConfig], tuple[tuple[int, int, int], ...]] = _keys_and_values
    about: About | None = None

    def keeps_keys_and_values(self, cfg: ModelConfig) -> bool:
        """Whether pages hold nothing else, so that layers attend through `attend`; others attend by themselves."""
        return self.state_shapes(cfg) == _keys_and_values(cfg)


@dataclass(frozen=True)
class Model:
    """Everything that a checkpoint directory holds but its weights.

    Attributes:
      tokenizer: the checkpoint's transformers tokenizer.
      eos_token_ids: ids that end an answer.
    """

    path: Path
    family: Family
    cfg: ModelConfig
    processor: Processor
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
