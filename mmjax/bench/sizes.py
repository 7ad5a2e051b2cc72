# SPDX-License-Identifier: Apache-2.0
"""Published model sizes by name: values of the config.json, and of preprocessor_config.json by family."""

from __future__ import annotations

from typing import Any

_QWEN3_VL_PROCESSOR = {
    "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"size": {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}},
    "qwen3_vl": _QWEN3_VL_PROCESSOR,
    "qwen3_vl_moe": _QWEN3_VL_PROCESSOR,
}


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


def _qwen3_vl(**text: Any) -> dict[str, Any]:
    shared = {
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    return {
        "model_type": "qwen3_vl",
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
    "qwen3-vl-8b": _qwen3_vl(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "qwen3-vl-30b-a3b": _qwen3_vl(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )
    | {"model_type": "qwen3_vl_moe"},
}
