# SPDX-License-Identifier: Apache-2.0
"""Config of LightOnOCR, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmjax.models.hf_config import ConfigSection
from mmjax.models.pixtral_shared.config import PixtralConfig, read_config

# What files leave out has the values of transformers' Qwen3 class.
_TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,  # it alone decides, whatever `sliding_window` says
}


def config(hf: Mapping[str, Any]) -> PixtralConfig:
    """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key."""
    top = ConfigSection(hf)
    top.section("text_config").choice("model_type", ("qwen3",), "qwen3")
    # A Qwen3 decoder is Mistral's with norms of queries and keys.
    cfg = read_config(
        {**hf, "text_config": {**_TEXT_DEFAULTS, **hf["text_config"], "model_type": "mistral"}},
        tie_word_embeddings=top.flag("tie_word_embeddings", True),
        merge=top.integer("spatial_merge_size", 2),
        patch_merger=True,
        projector_bias=False,
        image_token=151655,
        feature_layer=-1,
    )
    return replace(cfg, text=replace(cfg.text, qk_norm=True))
