# SPDX-License-Identifier: Apache-2.0
"""Tiny Mistral3 and Pixtral-12B checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import TinyCheckpoint, redraw
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIALS = (
    "<s>",
    "</s>",
    "<pad>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
)
ID = {content: 256 + i for i, content in enumerate(SPECIALS)}
VOCAB = 272  # more than the tokenizer knows
PATCH = {"mistral3": 14, "pixtral": 16, "lighton_ocr": 14}
MERGE = {"mistral3": 2, "pixtral": 1, "lighton_ocr": 2}

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set wrap = {'system': ['[SYSTEM_PROMPT]', '[/SYSTEM_PROMPT]'], 'user': ['[INST]', '[/INST]']} -%}
{%- set around = wrap.get(message.role, ['', eos_token]) -%}
{{- around[0] -}}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}[IMG]
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- around[1] -}}
{%- endfor -%}
"""


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
    projector_bias: bool | None = None,
    hidden_act: str = "silu",
    **clip_limits: Any,
) -> TinyCheckpoint:
    """Makes and saves a model of `family` ("mistral3" or "pixtral") with its processor.

    Args:
      mlp, vision_mlp: MLP widths of decoder and tower.
      tie: share the embedding with the output head.
      longest_edge: pixels; the largest picture is a square of it, rounded up.
      projector_bias: the class's own default if None.
      hidden_act: of the tower's MLPs.
      clip_limits: of families that have clips; they mean nothing here.
    """
    torch.manual_seed(seed)
    shared = {
        "text_config": text_config(layers, mlp),
        "vision_config": vision_config(vision_depth, vision_mlp, PATCH[family], longest_edge, hidden_act),
        "image_token_index": ID["[IMG]"],
        "vision_feature_layer": -1,
        "tie_word_embeddings": tie,
    }
    if projector_bias is not None:
        shared["multimodal_projector_bias"] = projector_bias
    if family == "mistral3":
        config = transformers.Mistral3Config(**shared, spatial_merge_size=MERGE[family])
        model = transformers.Mistral3ForConditionalGeneration(config)
    else:
        config = transformers.LlavaConfig(**shared, vision_feature_select_strategy="full")
        model = transformers.LlavaForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    redraw(model, seed, scale=0.16)  # less, and answers soon repeat one token
    processor = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(size={"longest_edge": longest_edge}, patch_size=PATCH[family]),
        tokenizer(),
        patch_size=PATCH[family],
        spatial_merge_size=MERGE[family],
        chat_template=CHAT_TEMPLATE,
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return TinyCheckpoint(path, model, processor)


def text_config(layers: int, mlp: int) -> dict[str, Any]:
    """A decoder whose heads are wider than its width divided by their number, as in published checkpoints."""
    return {
        "model_type": "mistral",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": ID["<s>"],
        "eos_token_id": ID["</s>"],
        "pad_token_id": ID["<pad>"],
    }


def vision_config(depth: int, mlp: int, patch: int, longest_edge: int, hidden_act: str) -> dict[str, Any]:
    """The tower."""
    return {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": mlp,
        "num_hidden_layers": depth,
        "num_attention_heads": 2,
        "image_size": longest_edge,
        "patch_size": patch,
        "hidden_act": hidden_act,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
    }


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """256 byte tokens without merges, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in SPECIALS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )
