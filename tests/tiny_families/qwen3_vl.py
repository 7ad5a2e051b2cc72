# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3-VL checkpoints: two deepstack levels, and a table of positions that every picture resamples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
import transformers

BLOCK = 32 * 32  # pixels of a merge block
HALF = [0.5, 0.5, 0.5]


CLASSES = {"qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration)}


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
    """Makes and saves a model of `family` with its processor; options as in `tiny.build`.

    Args:
      layers: at least; a layer behind the last deepstack level is added, else nothing would follow from that level.
      video_blocks, max_frames: limits of clips: merge blocks of every frame of a clip of 8 frames or `max_frames`,
        whichever is less.
    """
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[family]
    vision = vision_config(vision_depth, vision_mlp)
    config = config_class(
        text_config=text_config(max(layers, 1 + len(vision["deepstack_visual_indexes"])), mlp),
        vision_config=vision,
        tie_word_embeddings=tie,
        **token_ids(),
    )
    model = model_class(config)
    model.set_attn_implementation("eager")
    tiny.redraw(model, seed)
    processor = make_processor(video_blocks, max_frames)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return tiny.TinyCheckpoint(path, model, processor)


def text_config(layers: int, mlp: int) -> dict[str, Any]:
    """A decoder whose heads are wider than its width divided by their number."""
    return {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 64,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        # Of 12 pairs the interleaved axes take 5, 4 and 3: the last one runs out first.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [5, 4, 3],
            "mrope_interleaved": True,
        },
        "bos_token_id": tiny.ID["<|endoftext|>"],
        "eos_token_id": tiny.ID["<|im_end|>"],
        "pad_token_id": tiny.ID["<|endoftext|>"],
    }


def vision_config(depth: int, mlp: int) -> dict[str, Any]:
    """A tower with a deepstack level after each of its first blocks, two at most, and a table of 5 x 5 positions."""
    return {
        "depth": depth,
        "hidden_size": 32,
        "intermediate_size": mlp,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": list(range(min(depth, 2))),
    }


def token_ids() -> dict[str, int]:
    """The ids that the top level of config.json names."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{kind}_token_id": tiny.ID[f"<|{token}|>"] for kind, token in names.items()}


def make_processor(video_blocks: int, max_frames: int) -> transformers.ProcessorMixin:
    """Pictures of 4 to 64 merge blocks; the limits of clips count all of their frames."""

    def size(blocks: int) -> dict[str, int]:
        return {"shortest_edge": 4 * BLOCK, "longest_edge": blocks * BLOCK}

    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(size=size(64), patch_size=16, image_mean=HALF, image_std=HALF),
        tiny.tokenizer(),
        transformers.Qwen3VLVideoProcessor(size=size(video_blocks * min(max_frames, 8)), max_frames=max_frames),
        chat_template=tiny.CHAT_TEMPLATE,
    )
