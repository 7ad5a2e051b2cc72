# SPDX-License-Identifier: Apache-2.0
"""Claim: messages in the usual dialects are read alike, and what is not understood is refused with its place."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.errors import RequestError
from mmjax.inputs.content_parts import media_parts, parse_messages
from mmjax.inputs.items import Modality


def only_media(part: dict):
    (media,) = media_parts(parse_messages([{"role": "user", "content": [part]}]))
    return media


@pytest.mark.parametrize(
    ("part", "modality", "source"),
    [
        ({"type": "image", "image": "a.png"}, Modality.IMAGE, "a.png"),
        ({"type": "image", "image": b"\x89PNG"}, Modality.IMAGE, b"\x89PNG"),
        ({"type": "image", "url": "http://x/a.png"}, Modality.IMAGE, "http://x/a.png"),
        ({"type": "image", "path": "a.png"}, Modality.IMAGE, "a.png"),
        ({"type": "image"}, Modality.IMAGE, None),
        ({"image": "a.png"}, Modality.IMAGE, "a.png"),
        ({"type": "image_url", "image_url": {"url": "data:x", "detail": "high"}}, Modality.IMAGE, "data:x"),
        ({"type": "image_url", "image_url": "http://x"}, Modality.IMAGE, "http://x"),
        ({"type": "video", "video": "a.mp4"}, Modality.VIDEO, "a.mp4"),
        ({"type": "video_url", "video_url": {"url": "http://x"}}, Modality.VIDEO, "http://x"),
        (
            {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}},
            Modality.AUDIO,
            "data:audio/mp3;base64,QUJD",
        ),
        ({"type": "audio", "audio": "a.wav"}, Modality.AUDIO, "a.wav"),
        ({"type": "audio_url", "audio_url": {"url": "http://x"}}, Modality.AUDIO, "http://x"),
    ],
)
def test_media_parts(part, modality, source):
    media = only_media(part)
    assert (media.modality, media.source, media.uuid, media.options) == (modality, source, None, {})


def test_arrays_are_sources():
    pixels = np.zeros((2, 2, 3), np.uint8)
    assert only_media({"type": "image", "image": pixels}).source is pixels


def test_options_and_names_of_one_item():
    media = only_media({"type": "image", "image": "a", "max_pixels": 9, "uuid": "u"})
    assert (media.options, media.uuid) == ({"max_pixels": 9}, "u")
    assert only_media({"type": "image_url", "image_url": {"url": "x", "uuid": "v"}}).uuid == "v"


def test_messages_keep_their_order_and_other_keys():
    messages = [
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}, {"type": "image", "image": "1"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": [{"type": "image", "image": "2"}]},
    ]
    first, second, third = parse_messages(messages)
    assert first.content[:2] == ["a", "b"]
    assert (second.content, second.extra) == (None, {"tool_calls": [{"name": "f"}]})
    assert [part.source for part in media_parts([first, second, third])] == ["1", "2"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        ("hello", "non-empty list"),
        ([{"content": "x"}], "message 0 is not a dict with a role"),
        ([{"role": "user", "content": "x"}, "y"], "message 1 is not a dict with a role"),
        ([{"role": "user", "content": 7}], "message 0: content must be text or a list"),
        ([{"role": "user", "content": [7]}], "message 0, part 0: a part is text or a dict, got int"),
        ([{"role": "user", "content": ["a", {"type": "hologram"}]}], "message 0, part 1: unknown part type 'hologram'"),
        ([{"role": "user", "content": [{"image": "a", "video": "b"}]}], "unknown part type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a string under 'text'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "needs a string under 'url'"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"format": "wav"}}]}], "under 'data'"),
        ([{"role": "user", "content": [{"type": "image", "image": "a", "uuid": 7}]}], "uuid must be a string"),
    ],
)
def test_what_is_not_understood_is_refused(messages, message):
    with pytest.raises(RequestError, match=message):
        parse_messages(messages)
