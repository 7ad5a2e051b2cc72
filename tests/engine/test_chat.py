# SPDX-License-Identifier: Apache-2.0
"""Claim: chats become the ids that the checkpoint's own tokenizer gives, one placeholder an item, in content order."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from inputs_kit import OPENAI_TEMPLATE, PLACEHOLDERS, STRING_TEMPLATE, make_tokenizer

from mmjax.errors import CheckpointError, PlaceholderError, RequestError
from mmjax.inputs.chat import ChatRenderer, load_chat_template
from mmjax.inputs.items import Modality

IMAGE = {"type": "image", "image": "a.png"}
VIDEO = {"type": "video", "video": "a.mp4"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatRenderer(tokenizer, PLACEHOLDERS)


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def user(*content) -> dict:
    return {"role": "user", "content": content[0] if len(content) == 1 else list(content)}


def reference(tokenizer, messages, **options) -> list[int]:
    """The library's own answer."""
    encoded = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, **options)
    return list(encoded["input_ids"])


CONVERSATIONS = {
    "plain": [user("what is in the picture?")],
    "edges": [user("  spaces, tabs\t and\n\nlines 12345 \n")],
    "unicode": [user("é é 你好 \U0001f600 <b>|x|</b>")],
    "empty": [user("")],
    "blank": [user(" \n ")],
    "turns": [
        {"role": "system", "content": "be kind"},
        user("hi"),
        {"role": "assistant", "content": "yes "},
        user("go"),
    ],
    "image": [user([IMAGE, text("what is this?")])],
    "media": [user([text("a "), IMAGE, text("b\n"), VIDEO, IMAGE, text(" c")]), {"role": "assistant", "content": "ok"}],
    "image alone": [user([IMAGE])],
    "added token": [user("<think> is text, like <tool_call>")],
    "thoughts": [user("a"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, user("b")],
    "split word": [user([text("ima"), text("ge pad")])],
}


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_ids_are_those_of_the_tokenizer(renderer, tokenizer, messages):
    assert renderer.encode(messages).token_ids.tolist() == reference(tokenizer, messages)


def test_ids_with_tools_and_calls(renderer, tokenizer):
    tools = [{"type": "function", "function": {"name": "f", "description": 'a "quoted" <x> | y', "parameters": {}}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "<b>|c"}}}
    messages = [
        user("x"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    expected = reference(tokenizer, messages, tools=tools)
    assert renderer.encode(messages, tools=tools).token_ids.tolist() == expected


def test_templates_for_strings_trim_as_they_like():
    tokenizer = make_tokenizer(STRING_TEMPLATE)
    messages = [{"role": "system", "content": " a "}, user("\n b  ")]
    assert ChatRenderer(tokenizer, PLACEHOLDERS).encode(messages).token_ids.tolist() == reference(tokenizer, messages)


def test_templates_for_strings_get_our_placeholders():
    tokenizer = make_tokenizer(STRING_TEMPLATE)
    prompt = ChatRenderer(tokenizer, PLACEHOLDERS).encode([user([text("A "), IMAGE, text(" B"), VIDEO])])
    expected = "<|im_start|>user\nA <|image_pad|> B<|video_pad|><|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == expected
    assert prompt.token_ids.tolist() == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert [part.modality for part in prompt.media] == ["image", "video"]


def test_templates_for_lists_alone_get_lists():
    template = "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' %}[{{ c.text }}]{% endif %}"
    template += "{% endfor %}{% endfor %}"
    renderer = ChatRenderer(make_tokenizer(template), PLACEHOLDERS)
    assert renderer.encode([user("abc")]).text == "[abc]"


def test_escaping_templates_see_the_real_text():
    tokenizer = make_tokenizer("{% for m in messages %}<|im_start|>{{ m.content | tojson }}{% endfor %}")
    messages = [user('a "b"\n')]
    assert ChatRenderer(tokenizer, {}).encode(messages).token_ids.tolist() == reference(tokenizer, messages)


def spans_between(tokenizer, ids) -> list[str]:
    """What a prompt says before, between and behind its placeholders, without the wrappers."""
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    for token in ("<|vision_start|>", "<|vision_end|>"):
        decoded = decoded.replace(token, "")
    decoded = decoded.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    return decoded.replace("<|video_pad|>", "<|image_pad|>").split("<|image_pad|>")


@pytest.mark.parametrize("template", [OPENAI_TEMPLATE, STRING_TEMPLATE], ids=["list", "string"])
def test_order_in_the_prompt_is_order_in_the_content(template):
    tokenizer = make_tokenizer(template)
    renderer = ChatRenderer(tokenizer, PLACEHOLDERS)
    one, two = {"type": "image", "image": "1"}, {"type": "image", "image": "2"}
    orders = list(itertools.permutations([text("A"), one, text("B"), two, text("C")]))
    for parts in orders:
        prompt = renderer.encode([user(list(parts))])
        said, expected = spans_between(tokenizer, prompt.token_ids), [""]
        for part in parts:
            if part["type"] == "text":
                expected[-1] += part["text"]
            else:
                expected.append("")
        assert said == expected
        assert [part.source for part in prompt.media] == [part["image"] for part in parts if part["type"] == "image"]


def test_media_follow_the_placeholders_when_a_template_sorts_them_by_kind():
    template = "{% for m in messages %}{% for c in m.content %}{% if c.type == 'video' %}<|video_pad|>{% endif %}"
    template += "{% endfor %}{% for c in m.content %}{% if c.type == 'image' %}<|image_pad|>{% endif %}{% endfor %}"
    template += "{% endfor %}"
    parts = [{"type": "image", "image": "1"}, {"type": "video", "video": "2"}, {"type": "image", "image": "3"}]
    prompt = ChatRenderer(make_tokenizer(template), PLACEHOLDERS).encode([user(parts)])
    assert [part.source for part in prompt.media] == ["2", "1", "3"]


def test_media_that_a_template_ignores_are_an_error():
    template = "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    template += "{% endfor %}{% endfor %}"
    with pytest.raises(PlaceholderError, match="made 0 image placeholders for 2 items"):
        ChatRenderer(make_tokenizer(template), PLACEHOLDERS).encode([user([IMAGE, IMAGE])])


def test_a_template_with_a_placeholder_too_many_is_an_error():
    tokenizer = make_tokenizer("<|video_pad|>{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(PlaceholderError, match="made 1 video placeholders for 0 items"):
        ChatRenderer(tokenizer, PLACEHOLDERS).encode([user("x")])


def test_a_modality_the_model_does_not_take(renderer):
    with pytest.raises(RequestError, match=r"item 1: this model takes no audio \(it takes image, video\)"):
        renderer.encode([user([IMAGE, {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}])])


def test_a_template_that_refuses(tokenizer):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatRenderer(tokenizer, PLACEHOLDERS, chat_template=template).encode([user("x")])


def test_template_options_pass_through(tokenizer):
    renderer = ChatRenderer(tokenizer, {}, chat_template="{% if fast %}F{% endif %}{{ messages[0].content }}")
    assert renderer.encode([user("x")], fast=True).text == "Fx"
    assert renderer.encode([user("x")], add_generation_prompt=False).text == "x"


def test_no_template_is_a_clear_error(tmp_path):
    bare = make_tokenizer(None)
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatRenderer(bare, PLACEHOLDERS)
    assert load_chat_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": OPENAI_TEMPLATE}))
    renderer = ChatRenderer(bare, PLACEHOLDERS, chat_template=load_chat_template(tmp_path))
    assert renderer.encode([user("x")]).text.startswith("<|im_start|>user\nx")
    assert bare.chat_template is None, "the caller's tokenizer is untouched"


def test_unknown_placeholders_and_slow_tokenizers_are_checkpoint_errors(tokenizer):
    with pytest.raises(CheckpointError, match="does not know the placeholder '<nope>'"):
        ChatRenderer(tokenizer, {Modality.IMAGE: "<nope>"})


def test_ids_are_int32(renderer):
    assert renderer.encode([user("x")]).token_ids.dtype == np.int32


@pytest.mark.parametrize("length", [10, 24, 28, 31, 32])
def test_a_template_may_cut_what_it_is_given(length):
    """Texts reach it as stand-ins of 32 digits first: however many are left, the prompt holds the text, cut."""
    template = "{% for message in messages %}{{ message['content'][:" + str(length) + "] }}.{% endfor %}"
    renderer = ChatRenderer(make_tokenizer(template), PLACEHOLDERS)
    words = "some words that go on for longer than that"
    assert renderer.encode([user(words)]).text == words[:length] + "."
