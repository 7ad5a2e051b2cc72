# SPDX-License-Identifier: Apache-2.0
"""Small stand-ins for what prompts are made of: a byte-level BPE with ChatML templates, a processor of toy spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from mmjax.inputs.items import ItemPlan, Modality
from mmjax.inputs.prompt import ItemInput

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
PADS = ("<|image_pad|>", "<|video_pad|>")
PLAIN_ADDED = ("<think>", "</think>")
PLACEHOLDERS = {Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"}

# Written for these tests in the manner of ChatML models: typed parts, roles, tools, trimming of thoughts in the past.
OPENAI_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{%- if message.role == 'assistant' and '</think>' in message.content %}
{{- message.content.split('</think>')[-1].lstrip() }}
{%- else %}{{ message.content }}{% endif %}
{%- else %}{% for part in message.content or [] %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
STRING_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(template: str | None = OPENAI_TEMPLATE) -> PreTrainedTokenizerFast:
    """Trained in a blink on a few sentences; splits words and digits like current models do."""
    split = Regex(r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    core = Tokenizer(BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    text = ["what is in the picture? the image shows a red ball and a pad of text", "user assistant system image pad"]
    trainer = BpeTrainer(vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(text * 3, trainer)
    core.add_special_tokens([AddedToken(token, normalized=False) for token in (*SPECIALS, PADS[0])])
    # One placeholder that the tokenizer does not call special: it must be guarded all the same.
    core.add_tokens([AddedToken(token, normalized=False) for token in (PADS[1], *PLAIN_ADDED)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


@dataclass(frozen=True)
class ToyProcessor:
    """Spans of toys. Text ids lie below `vocab`, where the kit's plans also find their placeholders."""

    vocab: int = 100
    placeholder_text: Mapping[Modality, str] = field(default_factory=lambda: dict(PLACEHOLDERS))
    placeholder_id: Mapping[Modality, int] = field(default_factory=lambda: {Modality.IMAGE: 90, Modality.VIDEO: 91})
    special_ids: Sequence[int] = (93, 94)
    never_sampled: Sequence[int] = (90, 91, 95, 96)
    axes: int = 1

    def positions(self, token_ids, spans) -> tuple[np.ndarray, int]:
        """One position a token; three times that for models with more axes."""
        assert all(isinstance(plan, ItemPlan) and 0 <= start < len(token_ids) for start, plan in spans)
        return np.tile(np.arange(len(token_ids), dtype=np.int32), (self.axes, 1)), 0


PAD, VIDEO_PAD, BREAK, END, START_WRAP, END_WRAP = 90, 91, 93, 94, 95, 96
SENTINEL = 101  # out of the toy vocabulary


def plan_of(
    ids: Sequence[int], embed: Sequence[bool] | None = None, modality: Modality = Modality.IMAGE, **fields: Any
) -> ItemPlan:
    """A plan with the given span; every position takes a row unless `embed` says otherwise."""
    flags = np.ones(len(ids), bool) if embed is None else np.array(embed, bool)
    rows = fields.pop("rows", int(flags.sum()))
    return ItemPlan(
        modality=modality,
        grid=fields.pop("grid", (1, 2, 2 * rows)),
        rows=rows,
        contexts=(4 * rows,),
        windows=0,
        span_ids=np.array(ids, np.int32),
        span_embed=flags,
        **fields,
    )


def block(rows: int, **fields: Any) -> ItemPlan:
    """A span of `rows` image placeholders."""
    return plan_of([PAD] * rows, **fields)


def clip(rows: int) -> ItemPlan:
    """A span of `rows` video placeholders."""
    return plan_of([VIDEO_PAD] * rows, modality=Modality.VIDEO)


def broken_rows(rows: int, columns: int) -> ItemPlan:
    """Rows of placeholders, each closed by a break, the last by an end, which keep their text embeddings."""
    ids = ([PAD] * columns + [BREAK]) * (rows - 1) + [PAD] * columns + [END]
    return plan_of(ids, [token == PAD for token in ids])


def learned_rows(rows: int, columns: int) -> ItemPlan:
    """Start, rows with newlines, end, all of them rows of the encoder: (columns + 1) * rows + 2."""
    return block((columns + 1) * rows + 2)


def timed_steps(steps: int, rows: int) -> ItemPlan:
    """A clip as one run of placeholders a temporal step, each behind two tokens of text (a time stamp)."""
    ids = ([7, 8] + [VIDEO_PAD] * rows) * steps
    return plan_of(ids, [token == VIDEO_PAD for token in ids], Modality.VIDEO)


def item_of(plan: ItemPlan, digest: str | None = "00" * 32, **fields: Any) -> ItemInput:
    """An item with a made-up identity."""
    patches = np.zeros((plan.encoder_tokens, 4), np.uint8)
    return ItemInput(plan, patches, digest, **fields)
