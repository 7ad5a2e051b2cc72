# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in Hugging Face's format: random model, byte-level tokenizer, processor; no network, a few MB.

Libraries start parameters at 0 or 1 in many places, which would hide a wrong name or a missing bias: all are redrawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

torch.set_num_threads(1)  # faster for matrices this small

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ID = {content: 256 + i for i, content in enumerate(SPECIALS)}
VOCAB = 272  # more than the tokenizer knows, as in published checkpoints

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') or 'image' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ('video', 'video_url') or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


@dataclass(frozen=True)
class TinyCheckpoint:
    """A saved checkpoint and the transformers objects it was saved from."""

    path: Path
    model: torch.nn.Module
    processor: transformers.ProcessorMixin


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
) -> TinyCheckpoint:
    """Makes and saves a model of `family` ("qwen2_vl" or "qwen2_5_vl") with its processor.

    Args:
      mlp: MLP width of the decoder.
      vision_mlp: MLP width of the tower; a multiple of its width, 32, in Qwen2-VL.
      tie: share the embedding with the output head.
      video_blocks, max_frames: limits of clips, which also set the largest encoder bucket.
    """
    torch.manual_seed(seed)
    ids = {
        f"{kind}_token_id": ID[f"<|{token}|>"]
        for kind, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    text = _text_config(layers, mlp)
    vision = _VISION_CONFIG[family](vision_depth, vision_mlp)
    config_class, model_class, processor_class = _CLASSES[family]
    model = model_class(config_class(text_config=text, vision_config=vision, tie_word_embeddings=tie, **ids))
    model.set_attn_implementation("eager")
    redraw(model, seed)
    processor = _processor(processor_class, video_blocks, max_frames)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return TinyCheckpoint(path, model, processor)


def redraw(model: torch.nn.Module, seed: int, scale: float = 0.08) -> None:
    """Draws every parameter anew: norm weights around 1, all others around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * scale
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(values + 1 if is_norm else values)
    model.eval()


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """256 byte tokens without merges, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in SPECIALS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )


def _text_config(layers: int, mlp: int) -> dict:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": ID["<|endoftext|>"],
        "eos_token_id": ID["<|im_end|>"],
        "pad_token_id": ID["<|endoftext|>"],
    }


def _qwen2_vl_vision(depth: int, mlp: int) -> dict:
    return {"depth": depth, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": mlp // 32}


def _qwen2_5_vl_vision(depth: int, mlp: int) -> dict:
    return {
        "depth": depth,
        "hidden_size": 32,
        "intermediate_size": mlp,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "window_size": 56,
        "tokens_per_second": 2,
    }


_VISION_CONFIG = {"qwen2_vl": _qwen2_vl_vision, "qwen2_5_vl": _qwen2_5_vl_vision}
_CLASSES = {
    "qwen2_vl": (
        transformers.Qwen2VLConfig,
        transformers.Qwen2VLForConditionalGeneration,
        transformers.Qwen2VLProcessor,
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        transformers.Qwen2_5_VLForConditionalGeneration,
        transformers.Qwen2_5_VLProcessor,
    ),
}


def _processor(processor_class: type, video_blocks: int, max_frames: int) -> transformers.ProcessorMixin:
    pixels = 28 * 28
    size = {"shortest_edge": 4 * pixels, "longest_edge": 64 * pixels}
    video_size = {"shortest_edge": 4 * pixels, "longest_edge": video_blocks * pixels}
    return processor_class(
        transformers.Qwen2VLImageProcessor(size=size),
        tokenizer(),
        transformers.Qwen2VLVideoProcessor(size=video_size, max_frames=max_frames),
        chat_template=CHAT_TEMPLATE,
    )
