# SPDX-License-Identifier: Apache-2.0
"""Config of Qwen3-VL, read from a checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.decoder.config import MoeConfig, decoder_config
from mmjax.models.hf_config import ConfigSection, compute_dtype
from mmjax.models.qwen_shared.config import QwenConfig, QwenVisionConfig, token_fields, vision_fields

HEAD_DIM = 128  # of the text model where the file names none, whatever its width


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig(QwenVisionConfig):
    """The tower.

    Attributes:
      table_side: entries along one side of the square table of learned positions.
      deepstack_blocks: blocks whose output makes deepstack level 0, 1, ..., ascending.
    """

    table_side: int
    deepstack_blocks: tuple[int, ...]


@dataclass(frozen=True)
class Qwen3VLConfig(QwenConfig):
    """Qwen3-VL: LayerNorm tower with deepstack levels, decoder with query and key norms and interleaved mRoPE."""

    vision: Qwen3VLVisionConfig

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], moe: MoeConfig | None = None) -> Qwen3VLConfig:
        """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key.

        Args:
          moe: the decoder's experts, where the family has some.
        """
        top = ConfigSection(hf)
        vision = _vision_config(top.section("vision_config"), top.section("text_config").integer("hidden_size"))
        text = ConfigSection({"head_dim": HEAD_DIM, **hf["text_config"]}, "text_config")
        return cls(
            # Level k is added after text layer k, whichever block of the tower it comes from. A `tie_word_embeddings`
            # inside text_config does not count, as in transformers.
            text=decoder_config(
                text,
                mrope=True,
                tie_word_embeddings=top.flag("tie_word_embeddings", False),
                window_flag=True,
                mrope_interleaved=True,
                qk_norm=True,
                deepstack_layers=tuple(range(len(vision.deepstack_blocks))),
                moe=moe,
            ),
            vision=vision,
            dtype=compute_dtype(top, text),
            **token_fields(top),
        )


def _vision_config(v: ConfigSection, text_width: int) -> Qwen3VLVisionConfig:
    fields = vision_fields(
        v, width_key="hidden_size", out_key="out_hidden_size", text_width=text_width, act="gelu_pytorch_tanh"
    )
    entries, levels = v.integer("num_position_embeddings"), v.integers("deepstack_visual_indexes")
    side = math.isqrt(entries)
    if side < 1 or side * side != entries:
        raise v.error("num_position_embeddings", f"must be the square of a positive integer, got {entries}")
    if list(levels) != sorted(set(levels)) or not set(levels) <= set(range(fields["depth"])):
        raise v.error(
            "deepstack_visual_indexes", f"must ascend within 0..{fields['depth'] - 1} (depth - 1), got {list(levels)}"
        )
    return Qwen3VLVisionConfig(
        intermediate_size=v.integer("intermediate_size"), table_side=side, deepstack_blocks=levels, **fields
    )
