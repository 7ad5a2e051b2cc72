# SPDX-License-Identifier: Apache-2.0
"""Published model sizes by name: values of the config.json and the pixel limits of the checkpoints."""

from __future__ import annotations

from typing import Any

PIXEL_LIMITS = {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}


def _qwen2_5_vl(**text: Any) -> dict[str, Any]:
    shared = {
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    }
    return {
        "model_type": "qwen2_5_vl",
        "dtype": "bfloat16",
        "text_config": shared | text,
        "vision_config": vision,
    }


SIZES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": _qwen2_5_vl(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "qwen2.5-vl-3b": _qwen2_5_vl(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}
