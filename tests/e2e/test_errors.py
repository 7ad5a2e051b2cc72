# SPDX-License-Identifier: Apache-2.0
"""Claim: what can't be served fails before any device work; its typed error names request, item and both numbers.

Nobody else is harmed.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from llm_kit import GREEDY, assert_nothing_held, clip, noise, png, user
from PIL import Image

import mmjax
from mmjax.errors import MediaError, PlaceholderError, PromptTooLongError, RequestError
from mmjax.frontend import Frontend

pytestmark = pytest.mark.timeout(300)

GOOD = user(noise(84, 140, 1), "what?")


def encoded(pixels: np.ndarray, kind: str, mode: str | None = None) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(file, kind)
    return file.getvalue()


def bomb(height: int, width: int) -> bytes:
    """A PNG of a few bytes that claims many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


PNG, JPEG = png(noise(200, 200)), encoded(noise(200, 200), "JPEG")
EMBEDDING = np.zeros((15, 64), np.float32)  # GOOD's picture has 3 x 5 rows

# name: (messages, options of the call, error, what its text says, item)
BAD = {
    "zero bytes": (user("a", b"", "b"), {}, MediaError, "", 0),
    "not a picture": (user(noise(84, 140), b"GIF no", "?"), {}, MediaError, "not a picture", 1),
    "truncated PNG": (user(PNG[: len(PNG) // 2], "?"), {}, MediaError, "can't be decoded", 0),
    "truncated JPEG": (user(noise(30, 30), noise(30, 30), JPEG[:600], "?"), {}, MediaError, "can't be decoded", 2),
    "header alone": (user(PNG[:33], "?"), {}, MediaError, "not a picture", 0),
    "missing file": (
        [{"role": "user", "content": [{"type": "image", "image": "/no/such.png"}]}], {}, MediaError, "/no/such.png", 0,
    ),
    "bomb": (user(bomb(60_000, 60_000), "?"), {}, MediaError, r"3600000000 pixels.*178956970", 0),
    "no pixels": (user(bomb(0, 100), "?"), {}, MediaError, "", 0),
    "32-bit grey": (user(encoded(np.full((90, 90), 70_000, np.int32), "TIFF"), "?"), {}, MediaError, "mode I", 0),
    "float grey": (user(encoded(np.full((90, 90), 0.5, np.float32), "TIFF"), "?"), {}, MediaError, "mode F", 0),
    "float array": (user(noise(90, 90) / 255, "?"), {}, MediaError, "uint8 array, got float64", 0),
    "five channels": (user(np.zeros((90, 90, 5), np.uint8), "?"), {}, MediaError, "90 x 90 x 5", 0),
    "thin": (user(noise(1, 201), "?"), {}, RequestError, "aspect ratio 201 .* 200", 0),
    "no picture": ([{"role": "user", "content": [{"type": "image"}]}], {}, RequestError, "holds no image", 0),
    "sound": ([{"role": "user", "content": [{"type": "audio", "audio": b"x"}]}], {}, RequestError, "audio", 0),
    "no frames": (user(clip(0, 56, 56), "?"), {}, MediaError, "0 frames", 0),
    "no frame rate": (user((clip(4, 56, 56), {"fps": 0.0}), "?"), {}, MediaError, "fps", 0),
    "long clip": (user(clip(9, 56, 56), "?"), {}, RequestError, "9 frames.* max_frames=6", 0),
    "large item": (
        user(noise(560, 560), "?"), {"mm_processor_kwargs": {"max_pixels": 10**7}}, RequestError, "1600 .* 512", 0,
    ),
    "long text": (user("a" * 600), {}, PromptTooLongError, r"6\d\d tokens.* 511", None),
    "pictures": (user(*[noise(200, 200, i) for i in range(11)]), {}, PromptTooLongError, r"\d+ tokens.* 511", None),
    "processor option": (GOOD, {"mm_processor_kwargs": {"max_pixel": 1}}, RequestError, "max_pixel", 0),
    "processor value": (GOOD, {"mm_processor_kwargs": {"max_pixels": -1}}, RequestError, "max_pixels.*-1", 0),
    "names": (GOOD, {"multi_modal_uuids": {"image": ["a", "b"]}}, RequestError, "2 names for 1 image", None),
    "modality": (GOOD, {"multi_modal_uuids": {"smell": ["a"]}}, RequestError, "smell", None),
    "no role": ([{"content": "hi"}], {}, RequestError, "role", None),
    "unknown part": ([{"role": "user", "content": [{"type": "smell"}]}], {}, RequestError, "smell", None),
    "content": ([{"role": "user", "content": 3}], {}, RequestError, "int", None),
    "rows of a wrong width": (
        GOOD, {"multi_modal_embeddings": {"image": [EMBEDDING[:, :-1]]}}, RequestError, "63", 0,
    ),
    "too few rows": (GOOD, {"multi_modal_embeddings": {"image": [EMBEDDING[:-1]]}}, RequestError, "14.*15|15.*14", 0),
    "rows of rank 3": (GOOD, {"multi_modal_embeddings": {"image": [EMBEDDING[None]]}}, RequestError, "", 0),
    "rows of integers": (
        GOOD, {"multi_modal_embeddings": {"image": [EMBEDDING.astype(int)]}}, RequestError, "int64", 0,
    ),
    "rows of NaN": (GOOD, {"multi_modal_embeddings": {"image": [EMBEDDING * np.nan]}}, RequestError, "", 0),
    "more rows than pictures": (
        GOOD, {"multi_modal_embeddings": {"image": [EMBEDDING] * 2}}, PlaceholderError, "2 entries for 1 image", None,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def answer(tiny_llm):
    """The good neighbour's answer when it is alone."""
    return tiny_llm().chat(GOOD, GREEDY).token_ids


def check(error: BaseException, kind: type, text: str, item: int | None) -> None:
    assert type(error) is kind
    assert error.item == item
    assert error.request_id is not None
    assert str(error).startswith(f"request {error.request_id}")
    assert item is None or f"item {item}" in str(error)


@pytest.mark.parametrize("name", list(BAD))
def test_alone_it_raises_before_any_device_work(llm, name):
    messages, options, kind, text, item = BAD[name]
    calls = (
        lambda: llm.chat(messages, GREEDY, **options),
        lambda: llm.submit(messages, GREEDY, **options).result(),
        lambda: list(llm.stream(messages, GREEDY, **options)),
    )
    for call in calls:
        with pytest.raises(kind, match=f"(?s){text}") as caught:
            call()
        check(caught.value, kind, text, item)
    assert llm.running.engine.trace.steps == 0


def test_in_a_list_it_leaves_its_neighbours_alone(llm, answer):
    """All of them at once, each between two good ones."""
    messages, options = [], []
    for bad, own, *_ in BAD.values():
        messages += [GOOD, bad]
        options += [{}, own]
    names = sorted({name for own in options for name in own})
    outs = llm.chat(messages, GREEDY, **{name: [own.get(name) for own in options] for name in names})
    assert [out.token_ids for out in outs[::2]] == [answer] * len(BAD)
    for out, (_, _, kind, text, item) in zip(outs[1::2], BAD.values(), strict=True):
        assert (out.finish_reason, out.text, out.token_ids) == ("error", "", [])
        check(out.error, kind, text, item)
    assert_nothing_held(llm)


IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
MISCOUNTED = [
    (f"{IMAGE}{IMAGE}{IMAGE}?", {"image": [noise(84, 140)]}, ("3 image", "1 item")),
    ("no slot", {"image": [noise(84, 140)]}, ("0 image", "1 item")),
    (f"{IMAGE}?", None, ("1 image", "0 item")),
    (f"{IMAGE}?", {"image": [noise(84, 140), noise(84, 140)]}, ("1 image", "2 item")),
    (f"{VIDEO}{VIDEO}?", {"video": [clip(4, 56, 56)]}, ("2 video", "1 item")),
    (f"{VIDEO}?", {"image": [noise(84, 140)]}, ("0 image", "1 item")),
    (f"{IMAGE}{VIDEO}?", {"image": [noise(84, 140)]}, ("1 video", "0 item")),
    (f"{IMAGE}?", {"image": [noise(84, 140)], "video": [clip(4, 56, 56)]}, ("0 video", "1 item")),
]


@pytest.mark.parametrize(("prompt", "media", "says"), MISCOUNTED)
def test_placeholders_and_items_must_agree(llm, prompt, media, says):
    for form in (prompt, llm.model.tokenizer.encode(prompt)):
        with pytest.raises(PlaceholderError) as caught:
            llm.generate(form, GREEDY, media)
        assert all(part in str(caught.value) for part in says), str(caught.value)
        assert caught.value.request_id is not None
    assert llm.running.engine.trace.steps == 0


def test_miscounted_prompts_leave_a_good_one_alone(llm):
    good = f"{IMAGE}what?", {"image": [noise(84, 140, 1)]}
    alone = llm.generate(good[0], GREEDY, good[1])
    pairs = [pair for prompt, media, _ in MISCOUNTED for pair in (good, (prompt, media))]
    outs = llm.generate([prompt for prompt, _ in pairs], GREEDY, [media for _, media in pairs])
    assert [out.token_ids for out in outs[::2]] == [alone.token_ids] * len(MISCOUNTED)
    assert [type(out.error) for out in outs[1::2]] == [PlaceholderError] * len(MISCOUNTED)


@pytest.mark.parametrize(
    ("ids", "says"), [([], "empty"), ([5, 272], "272 .* 272"), ([5, -1], "-1"), ([[1, 2], [3, 4]], None)]
)
def test_prompts_of_ids(llm, ids, says):
    if says is None:
        assert len(llm.generate(ids, GREEDY)) == 2
        return
    outs = llm.generate([ids, [5, 6]], GREEDY)
    assert outs[1].finish_reason == "length"
    assert type(outs[0].error) is RequestError
    with pytest.raises(RequestError, match=says):
        raise outs[0].error


def test_limits_of_the_configuration(llm, monkeypatch):
    config = replace(llm.multimodal, max_image_pixels=10_000, limit_mm_per_prompt={"image": 1, "video": 0})
    monkeypatch.setattr(llm, "frontend", Frontend(llm.model, config, llm._media))
    monkeypatch.setattr("mmjax.media.images.decode_image", lambda *_: pytest.fail("decoded"))
    for picture in (png(noise(101, 100)), noise(101, 100), Image.fromarray(noise(101, 100))):
        with pytest.raises(MediaError, match=r"101 x 100 = 10100 pixels.*10000"):
            llm.chat(user(picture, "?"))
    with pytest.raises(RequestError, match=r"2 image items.* 1"):
        llm.chat(user(noise(50, 50), noise(50, 50)))
    with pytest.raises(RequestError, match=r"1 video items.* 0"):
        llm.chat(user(clip(4, 50, 50)))


def test_encode_names_the_item(llm):
    with pytest.raises(MediaError, match="item 1") as caught:
        llm.encode([noise(84, 140), b"nothing"])
    assert (caught.value.item, caught.value.request_id is not None) == (1, True)
    assert llm.running.engine.trace.steps == 0


def test_empty_lists_give_empty_lists(llm):
    assert llm.chat([]) == []
    assert llm.generate([]) == []
    assert llm.generate([], GREEDY, [], cache_salt=[]) == []
    assert llm.encode([]) == []


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hi"}, 3, None, [3], [[]], [None, "x"]])
def test_what_is_no_conversation_is_refused(llm, messages):
    if isinstance(messages, list):
        outs = llm.chat(messages, GREEDY)
        assert [type(out.error) for out in outs] == [RequestError] * len(messages)
    else:
        with pytest.raises(RequestError, match="conversation"):
            llm.chat(messages, GREEDY)


def test_calls_that_make_no_sense(llm):
    with pytest.raises(TypeError, match=r"unknown option 'salt'.*cache_salt"):
        llm.chat(GOOD, salt="x")
    with pytest.raises(TypeError, match="unknown option"):
        llm.chat([GOOD, GOOD], salt="x")
    with pytest.raises(RequestError, match="3 sampling params for 2 requests"):
        llm.chat([GOOD, GOOD], [GREEDY] * 3)
    with pytest.raises(RequestError, match="cache_salt has 3 entries for 2 requests"):
        llm.chat([GOOD, GOOD], cache_salt=["a", "b", "c"])
    with pytest.raises(RequestError, match="1 entries of multi_modal_data for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, [None])
    with pytest.raises(RequestError, match="SamplingParams, got dict"):
        llm.chat(GOOD, {"max_tokens": 3})
    with pytest.raises(mmjax.ConfigError, match=r"truncate.*middle"):
        llm.chat(GOOD, truncate="middle")
    assert llm.running.engine.trace.steps == 0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens=5 exceeds max_tokens=3"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"stop": ""}, "stop"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0"),
    ],
)
def test_sampling_params_are_checked_when_they_are_made(bad, says):
    with pytest.raises(RequestError, match=says):
        mmjax.SamplingParams(**bad)


def test_prompts_that_are_truncated_on_request(llm):
    """Whole items go; what was dropped is said."""
    pictures = [noise(200, 200, i) for i in range(11)]
    outs = [llm.chat(user(*pictures, "and?"), GREEDY, truncate=side) for side in ("left", "right")]
    for out in outs:
        assert out.error is None
        assert len(out.prompt_token_ids) <= 511
        assert out.usage.image_tokens % 49 == 0  # 7 x 7 rows each
        assert "dropped image" in out.warnings[-1]
    assert outs[0].prompt_token_ids[-1] == llm.model.tokenizer.encode("\n")[-1]
