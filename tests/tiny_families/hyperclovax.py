# SPDX-License-Identifier: Apache-2.0
"""Tiny HyperCLOVAX vision checkpoints: every scale differs from 1, and the tower is not as wide as the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

OUT_WIDTH = 48  # of the tower's rows, before the projector


def build(
    family: str,
    path: Path,
    *,
    seed: int = 0,
    layers: int = 3,
    vision_depth: int = 3,
    mlp: int = 112,
    vision_mlp: int = 64,
    tie: bool = False,
    video_blocks: int = 64,
    max_frames: int = 768,
) -> tiny.TinyCheckpoint:
    """Makes and saves a model of `family` with its processor; options as in `tiny.build`."""
    if not hasattr(transformers, "HyperCLOVAXVisionV2Config"):
        pytest.skip(f"transformers {transformers.__version__} has no HyperCLOVAX vision; 5.24 brought it")
    torch.manual_seed(seed)
    config = transformers.HyperCLOVAXVisionV2Config(
        text_config=text_config(layers, mlp),
        vision_config=vision_config(vision_depth, vision_mlp),
        image_token_id=tiny.ID["<|image_pad|>"],
        video_token_id=tiny.ID["<|video_pad|>"],
        tie_word_embeddings=tie,
    )
    model = transformers.HyperCLOVAXVisionV2ForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    tiny.redraw(model, seed)
    processor = tiny._processor(transformers.HyperCLOVAXVisionV2Processor, video_blocks, max_frames)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return tiny.TinyCheckpoint(path, model, processor)


def text_config(layers: int, mlp: int) -> dict[str, Any]:
    """As published: grouped heads, norms behind every branch, and the four scales."""
    return tiny._text_config(layers, mlp) | {
        "model_type": "hyperclovax",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.7,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.8,
        "use_post_norm": True,
    }


def vision_config(depth: int, mlp: int) -> dict[str, Any]:
    return tiny._qwen2_5_vl_vision(depth, mlp) | {"model_type": "qwen2_5_vl", "out_hidden_size": OUT_WIDTH}
