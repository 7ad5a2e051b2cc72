# SPDX-License-Identifier: Apache-2.0
"""Tiny LightOnOCR checkpoints. As published, sides of pictures are multiples of a patch, not of a merge block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
import transformers

from tiny_families import mistral

IMAGE = "<|image_pad|>"
CHAT_TEMPLATE = tiny.CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", IMAGE)


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
    longest_edge: int = 196,
    **clip_limits: Any,
) -> tiny.TinyCheckpoint:
    """Makes and saves a model with its processor; options as in `tiny_families.mistral.build`."""
    torch.manual_seed(seed)
    patch, merge = mistral.PATCH[family], mistral.MERGE[family]
    config = transformers.LightOnOcrConfig(
        text_config=text_config(layers, mlp),
        vision_config=mistral.vision_config(vision_depth, vision_mlp, patch, longest_edge, "silu"),
        spatial_merge_size=merge,
        image_token_id=tiny.ID[IMAGE],
        tie_word_embeddings=tie,
    )
    model = transformers.LightOnOcrForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    tiny.redraw(model, seed, scale=0.16)  # less, and answers soon repeat one token
    processor = make_processor({"size": {"longest_edge": longest_edge}, "patch_size": patch}, patch, merge)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return tiny.TinyCheckpoint(path, model, processor)


def text_config(layers: int, mlp: int) -> dict[str, Any]:
    """Qwen3, with heads wider than its width divided by their number."""
    special = {"bos_token_id": tiny.ID["<|endoftext|>"], "eos_token_id": tiny.ID["<|im_end|>"]}
    window = {"sliding_window": 4096, "use_sliding_window": False}
    return mistral.text_config(layers, mlp) | special | window | {"model_type": "qwen3", "pad_token_id": None}


def make_processor(pictures: dict[str, Any], patch: int, merge: int) -> transformers.LightOnOcrProcessor:
    """Args: pictures: settings of the image processor."""
    return transformers.LightOnOcrProcessor(
        transformers.PixtralImageProcessor(**pictures),
        tokenizer(),
        patch_size=patch,
        spatial_merge_size=merge,
        chat_template=CHAT_TEMPLATE,
    )


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Qwen's, which says by name what the tokens of pictures are."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        image_token=IMAGE,
        image_break_token="<|vision_pad|>",
        image_end_token="<|vision_end|>",
    )
