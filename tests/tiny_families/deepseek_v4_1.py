# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek-V4.1: a decoder of transformers with every kind of layer, and a random tower in published names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny import VOCAB, TinyCheckpoint, redraw, tokenizer

PLACEHOLDER = "<｜deepseek_image｜>"
IMAGE_TOKEN = 264  # the first id behind the special tokens of `tiny.tokenizer`

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 3,
    "num_hash_layers": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,  # low enough to bind
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "bos_token_id": 256,
    "eos_token_id": 258,
}
VISION = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 14,
    "max_image_tokens": 34,
    "min_pixels": 28 * 28,
}

# Names of transformers' modules, and what DeepSeek's checkpoints call them.
_RENAMED = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.compressor\.indexer\.(position_bias|kv_proj|gate_proj|kv_norm)", r".indexer.compressor.\1"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.", ".indexer."),
    (r"\.compressor\.position_bias", ".compressor.ape"),
    (r"\.compressor\.kv_norm", ".compressor.norm"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.gate_proj\.", ".wgate."),
    (r"\.e_score_correction_bias$", ".bias"),
)


def build(
    family: str, path: Path, *, seed: int = 0, vision_depth: int = 2, vision_bias: bool = True, **_others: int
) -> TinyCheckpoint:
    """Makes and saves a checkpoint. Its decoder always has one layer of each kind, whatever other options say.

    Args:
      vision_bias: routers have a bias of their own for image positions. transformers' decoder knows none, so the
        checkpoint's `model` routes images as text.
    """
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    torch.manual_seed(seed)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**TEXT))
    model.set_attn_implementation("eager")
    redraw(model, seed, scale=0.2)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                drawn = torch.rand(VOCAB, TEXT["n_routed_experts"], generator=generator).argsort(dim=1)
                buffer.copy_(drawn[:, : TEXT["num_experts_per_tok"]])
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    tensors = {**decoder_tensors(model), **(tower_tensors(vision_depth, generator) if vision_depth else {})}
    if vision_bias:
        for i in range(TEXT["num_hash_layers"], TEXT["num_hidden_layers"]):
            shape = (TEXT["n_routed_experts"],)
            tensors[f"layers.{i}.ffn.gate.vision_bias"] = torch.randn(shape, generator=generator) * 0.3
    config = {
        "model_type": "deepseek_v4_1",
        "architectures": ["DeepseekV41ForConditionalGeneration"],
        "dtype": "float32",
        "image_token_id": IMAGE_TOKEN,
        "text_config": json.loads(model.config.to_json_string(use_diff=False)) | {"use_vision_bias": vision_bias},
        "vision_config": VISION | {"num_hidden_layers": vision_depth},
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": [PLACEHOLDER]})
    words.chat_template = CHAT_TEMPLATE
    words.save_pretrained(path)
    return TinyCheckpoint(path, model, words)


def decoder_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The decoder's parameters and persistent buffers, experts one by one."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        if name.endswith("experts.gate_up_proj"):
            for i, joined in enumerate(tensor):
                gate, up = joined.chunk(2)
                tensors[name.replace("gate_up_proj", f"{i}.w1.weight")] = gate
                tensors[name.replace("gate_up_proj", f"{i}.w3.weight")] = up
        elif name.endswith("experts.down_proj"):
            for i, down in enumerate(tensor):
                tensors[name.replace("down_proj", f"{i}.w2.weight")] = down
        else:
            tensors[name] = tensor
    return tensors


def tower_tensors(depth: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tower, aligner and learned rows; weights of norms lie around 1."""
    width, mlp, text = VISION["hidden_size"], VISION["intermediate_size"], TEXT["hidden_size"]
    shapes = {
        "vision.patch_embed.proj.weight": (width, 3 * 14 * 14),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (text, 9 * width),
        "aligner.w1.bias": (text,),
        "aligner.w2.weight": (text, text),
        "aligner.w2.bias": (text,),
        "image_start": (text,),
        "image_end": (text,),
        "image_newline": (text,),
    }
    for i in range(depth):
        shapes |= {
            f"vision.blocks.{i}.norm1.weight": (width,),
            f"vision.blocks.{i}.attn.wqkv.weight": (3 * width, width),
            f"vision.blocks.{i}.attn.wqkv.bias": (3 * width,),
            f"vision.blocks.{i}.attn.wo.weight": (width, width),
            f"vision.blocks.{i}.attn.wo.bias": (width,),
            f"vision.blocks.{i}.norm2.weight": (width,),
            f"vision.blocks.{i}.mlp.w1.weight": (2 * mlp, width),
            f"vision.blocks.{i}.mlp.w2.weight": (width, mlp),
        }
    tensors = {}
    for name, shape in shapes.items():
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        tensors[name] = torch.randn(shape, generator=generator) * scale + ("norm" in name)
    return tensors
