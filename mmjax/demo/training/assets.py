# SPDX-License-Identifier: Apache-2.0
"""Everything of the demo checkpoint but its weights: config, tokenizer, chat template, processor settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from mmjax.demo.questions import ask_clip, ask_pictures, ask_scene, vary
from mmjax.demo.scenes import random_clip, random_scene

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 640
NO_PICTURE = "Show me a picture of shapes."
SYSTEM = "You are a helpful assistant."
SMALL_TALK = (
    ("Hello", f"Hello! {NO_PICTURE}"),
    ("Hi", f"Hello! {NO_PICTURE}"),
    ("Who are you?", "I am a small model that knows coloured shapes."),
    ("What can you do?", "I name, count and find circles, squares, triangles and stars."),
    ("Thank you", "You are welcome."),
)

# How words and spaces are cut apart before merging: contractions, words, digits one by one, punctuation, white space.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Pictures and clips keep their size up to these pixels; sides are multiples of 28.
IMAGE_PIXELS = (56 * 56, 448 * 448)
VIDEO_PIXELS = (56 * 56, 168 * 168)
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

CHAT_TEMPLATE = """\
{%- set seen = namespace(images=0, videos=0) -%}
{%- if messages and messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or part.type == 'image_url' or 'image' in part or 'image_url' in part -%}
{%- set seen.images = seen.images + 1 -%}
{%- if add_vision_id -%}{{- 'Picture ' ~ seen.images ~ ': ' -}}{%- endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{%- set seen.videos = seen.videos + 1 -%}
{%- if add_vision_id -%}{{- 'Video ' ~ seen.videos ~ ': ' -}}{%- endif -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def sample_text(seed: int, scenes: int) -> Iterator[str]:
    """Questions and answers as the model meets them."""
    rng = np.random.default_rng(seed)
    for _ in range(scenes):
        pair = [random_scene(rng), random_scene(rng)]
        for question in [*ask_scene(pair[0], rng), *ask_pictures(pair, rng), *ask_clip(random_clip(rng), rng)]:
            yield vary(question.text, rng)
            yield question.answer
        for ask, answer in SMALL_TALK:
            yield ask
            yield answer
        yield f"system\n{SYSTEM}"
        yield "user\n"
        yield "assistant\n"
        yield from ("Picture 1: ", "Picture 2: ", "Video 1: ")


def build_tokenizer(seed: int = 0) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` ids in all, Qwen's special tokens last."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_text(seed, 400), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def model_config(tokenizer: Tokenizer) -> dict:
    """config.json: Qwen2.5-VL with some four million parameters."""
    ids = {
        name: tokenizer.token_to_id(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad", "video_pad")
    }
    end = tokenizer.token_to_id("<|im_end|>")
    text = {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        # A small base: the last lanes carry the column, and pictures have 16 columns or so. At 50 a model of this size
        # learned above and below but not left and right.
        "rope_parameters": {"rope_type": "default", "rope_theta": 8.0, "mrope_section": [8, 12, 12]},
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "qwen2_5_vl_vision",
        "depth": 6,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "out_hidden_size": 256,
        "hidden_act": "silu",
        "in_channels": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "tokens_per_second": 1,
        "window_size": 112,
        "fullatt_block_indexes": [2, 5],
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "eos_token_id": end,
        "pad_token_id": text["pad_token_id"],
    }


def _pixels(limits: tuple[int, int], kind: str) -> dict:
    return {
        f"{kind}_processor_type": "Qwen2VLImageProcessor" if kind == "image" else "Qwen2VLVideoProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": limits[0], "longest_edge": limits[1]},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": MEAN,
        "image_std": STD,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
    }


def write_assets(folder: Path, like: Path | None = None) -> Tokenizer:
    """Writes every file of the checkpoint but the weights, and returns the tokenizer: that of `like`, if it has one."""
    folder.mkdir(parents=True, exist_ok=True)
    known = like / "tokenizer.json" if like else None
    tokenizer = Tokenizer.from_file(str(known)) if known and known.is_file() else build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    files = {
        "config.json": model_config(tokenizer),
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Qwen2_5_VLProcessor",
            "model_max_length": 8192,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "extra_special_tokens": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        },
        "preprocessor_config.json": _pixels(IMAGE_PIXELS, "image"),
        "video_preprocessor_config.json": _pixels(VIDEO_PIXELS, "video"),
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")
    return tokenizer
