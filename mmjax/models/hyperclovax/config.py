# SPDX-License-Identifier: Apache-2.0
"""Config of HyperCLOVAX vision, read from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.models.decoder.config import DecoderConfig, decoder_config
from mmjax.models.hf_config import ConfigSection, compute_dtype
from mmjax.models.qwen2_5_vl.config import Qwen25VLVisionConfig
from mmjax.models.vlm import VLMConfig


@dataclass(frozen=True)
class HyperClovaXConfig(VLMConfig):
    """The tower of Qwen2.5-VL, a linear projector, and a decoder with plain rotary positions and scales of its own."""

    vision: Qwen25VLVisionConfig
    image_token_id: int
    video_token_id: int

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """Ids that only items may bring into a context."""
        return (self.image_token_id, self.video_token_id)

    @property
    def window_capacity(self) -> int:
        return self.vision.window_capacity

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> HyperClovaXConfig:
        """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key.

        The type "vlm" is shared with other models: what tells this one is the types of its two parts.
        """
        top = ConfigSection(hf)
        text, v = top.section("text_config"), top.section("vision_config")
        text.choice("model_type", ("hyperclovax",))
        v.choice("model_type", ("qwen2_5_vl", "qwen2_5_vl_vision"))
        return cls(
            text=_text_config(text, top.flag("tie_word_embeddings", True)),
            vision=Qwen25VLVisionConfig.from_section(v, v.integer("out_hidden_size")),
            dtype=compute_dtype(top, text),
            image_token_id=top.integer("image_token_id", 128060),
            video_token_id=top.integer("video_token_id", 128061),
        )


def _text_config(text: ConfigSection, tie: bool) -> DecoderConfig:
    """Keys that are absent have the values of transformers' HyperCLOVAXConfig."""
    return decoder_config(
        text,
        tie_word_embeddings=tie,
        attention_scale=text.number("attention_multiplier") if "attention_multiplier" in text else None,
        embedding_multiplier=text.number("embedding_multiplier", 1.0),
        residual_multiplier=text.number("residual_multiplier", 1.0),
        logits_scaling=text.number("logits_scaling", 1.0),
        post_norms=text.flag("use_post_norm", True),
    )
