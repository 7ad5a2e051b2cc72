# SPDX-License-Identifier: Apache-2.0
"""Claim: counts add up to the expanded prompt, and the table of spans says what the engine uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from inputs_kit import (
    PAD,
    PADS,
    PLACEHOLDERS,
    SENTINEL,
    VIDEO_PAD,
    ToyProcessor,
    block,
    broken_rows,
    item_of,
    make_tokenizer,
    plan_of,
    timed_steps,
)

from mmjax.inputs.chat import ChatRenderer
from mmjax.inputs.explain import explain_prompt
from mmjax.inputs.items import Modality
from mmjax.inputs.prepare import prepare_prompt
from mmjax.inputs.usage import Usage

TOY = ToyProcessor()


def prepare(ids, items, processor=TOY, **options):
    return prepare_prompt(np.array(ids, np.int32), items, processor, vocab_size=TOY.vocab, **options)


@pytest.mark.parametrize("images", [0, 1, 3])
def test_prompt_tokens_are_their_parts(images):
    usage = prepare(
        [1, 2, *[PAD] * images, VIDEO_PAD], [item_of(broken_rows(2, 2))] * images + [item_of(timed_steps(2, 3))]
    ).usage
    assert usage == Usage(text_tokens=2 + 4, image_tokens=6 * images, video_tokens=6)
    assert usage.prompt_tokens == 2 + 6 * images + 10
    assert replace(usage, completion_tokens=5).total_tokens == usage.prompt_tokens + 5


@pytest.mark.parametrize("images", [0, 1, 3])
def test_counts_and_offsets_of_a_chat_refer_to_the_expanded_prompt(images):
    """An answer in the history is found where the expanded ids have it, not rows - 1 an image before."""
    tokenizer = make_tokenizer()
    pads = {modality: tokenizer.convert_tokens_to_ids(text) for modality, text in PLACEHOLDERS.items()}
    processor = ToyProcessor(placeholder_id=pads, special_ids=())
    picture = {"type": "image", "image": "x"}
    messages = [
        {"role": "user", "content": [picture] * images + [{"type": "text", "text": "what is in the picture?"}]},
        {"role": "assistant", "content": "a red ball"},
    ]
    chat = ChatRenderer(tokenizer, PLACEHOLDERS).encode(messages)
    items = [item_of(plan_of([pads[Modality.IMAGE]] * 6))] * images
    prompt = prepare_prompt(chat.token_ids, items, processor, vocab_size=len(tokenizer))
    assert prompt.usage.image_tokens == 6 * images
    assert prompt.usage.text_tokens == chat.token_ids.size - images
    assert prompt.usage.prompt_tokens == prompt.token_ids.size
    text = tokenizer.decode(prompt.token_ids)
    assert text.count(PADS[0]) == 6 * images
    answer = tokenizer.encode("a red ball", add_special_tokens=False)
    windows = np.lib.stride_tricks.sliding_window_view(prompt.token_ids, len(answer))
    (found,) = np.flatnonzero((windows == answer).all(axis=1))
    before = tokenizer.decode(prompt.token_ids[:found])
    assert before.endswith("<|im_start|>assistant\n")


def test_table_of_spans():
    items = [
        item_of(broken_rows(2, 2), "ab" * 32),
        item_of(timed_steps(2, 3), None),
        item_of(plan_of([SENTINEL] * 2, warnings=("shrunk",)), "cd" * 32),
    ]
    prompt = prepare([1, PAD, VIDEO_PAD, PAD], items)
    table = explain_prompt(prompt)
    first, second, third = table.spans
    assert (first.placeholder, first.tokens, first.rows) == ("in-vocabulary with specials", 6, 4)
    assert first.hash == "ab" * 32
    assert (second.runs, second.hash) == (((9, 3), (14, 3)), None)
    assert third.placeholder == "out-of-vocabulary"
    text = str(table)
    assert text.splitlines()[0] == "19 prompt tokens = 5 text + 8 image + 6 video"
    assert "1..6" in text
    assert "9..11, 14..16" in text
    assert "abababababab" in text
    assert "item 2: shrunk" in text
    columns = [line.index("rows") for line in text.splitlines() if "rows" in line]
    assert text.splitlines()[2][columns[0]] == "4"


def test_table_in_a_notebook_is_escaped():
    plan = replace(block(1), warnings=("<script>alert(1)</script>",))
    shown = explain_prompt(prepare([PAD], [item_of(plan)]))._repr_html_()
    assert shown.count("<tr>") == 2
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_a_prompt_without_items_has_counts_alone():
    table = explain_prompt(prepare([1, 2, 3], []))
    assert str(table) == "3 prompt tokens = 3 text"
    assert "<table>" not in table._repr_html_()


def test_the_table_reports_what_was_dropped():
    prompt = prepare([1, PAD], [item_of(block(6))], limit=3, truncate="right")
    assert str(explain_prompt(prompt)).endswith("truncated from the right: 7 to 1 tokens, dropped image 0")


@pytest.mark.parametrize(
    ("steps", "cell"), [(1, "2..4"), (4, "2..4, 7..9, 12..14, 17..19"), (6, "2..4, 7..9, ... 27..29 (6 runs)")]
)
def test_a_clip_of_many_steps_fits_a_cell(steps, cell):
    (span,) = explain_prompt(prepare([VIDEO_PAD, 3], [item_of(timed_steps(steps, 3))])).spans
    assert span.cells()[3] == cell
    assert len(span.runs) == steps
    assert span.tokens == 3 * steps
