# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3-VL mixtures: tower and prompts of `qwen3_vl`, and a decoder with experts in all layers but the first."""

from __future__ import annotations

from pathlib import Path

import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

from tiny_families import qwen3_vl


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
    expert_mlp: int = 24,
    published: bool = False,
) -> tiny.TinyCheckpoint:
    """Makes and saves a model with its processor; options as in `tiny_families.qwen3_vl.build`. Layer 0 is dense.

    Args:
      expert_mlp: MLP width of an expert.
      published: store experts as published checkpoints do, not as transformers 5 does.
    """
    torch.manual_seed(seed)
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": expert_mlp,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    }
    vision = qwen3_vl.vision_config(vision_depth, vision_mlp)
    config = transformers.Qwen3VLMoeConfig(
        text_config=qwen3_vl.text_config(max(layers, 1 + len(vision["deepstack_visual_indexes"])), mlp) | experts,
        vision_config=vision,
        tie_word_embeddings=tie,
        **qwen3_vl.token_ids(),
    )
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    tiny.redraw(model, seed)
    sharpen_routers(model, seed)
    model.save_pretrained(path)
    processor = qwen3_vl.make_processor(video_blocks, max_frames)
    processor.save_pretrained(path)
    if published:
        store_as_published(path)
    return tiny.TinyCheckpoint(path, model, processor)


def sharpen_routers(model: torch.nn.Module, seed: int) -> None:
    """Draws routers whose scores lie apart, so that rounding does not choose other experts."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def store_as_published(path: Path) -> None:
    """Turns the stored experts from [X, 2I, E] and [X, E, I], which transformers 5 writes, to [X, E, 2I], [X, I, E]."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
