# SPDX-License-Identifier: Apache-2.0
"""Claim: item digests are TensorRT-LLM's, byte for byte; a tenant's salt, and nothing else, moves them elsewhere."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from blake3 import blake3
from PIL import Image

from mmjax.inputs.hashing import (
    AudioData,
    ImageData,
    VideoData,
    canonical_bytes,
    hexdigest_to_int32,
    int32_to_hexdigest,
    item_digest,
    mm_processor_kwargs_hash,
)
from mmjax.inputs.items import VideoMetadata

RED = np.array([[[255, 0, 0], [255, 0, 0]]], np.uint8)  # 1 high, 2 wide
RED_DIGEST = "e4dd50ed0e3cb949c615c7f2596397aaad494b5ef18fdee2a9b204cb98ee4991"
META = {"frames_indices": [0, 1, 2], "fps": 30.0, "duration": 1.0, "total_num_frames": 3}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ab", "0100000000000000026162"),
        (b"ab", "0200000000000000026162"),
        (True, "0501"),
        (False, "0500"),
        (0, "030100"),
        (-1, "0301ff"),
        (127, "03017f"),
        (128, "03020080"),
        (-128, "0302ff80"),
        (256, "03020100"),
        (1.5, "043ff8000000000000"),
        ([1, "a"], "20000000000000000203010101000000000000000161"),
        ((1, "a"), "20000000000000000203010101000000000000000161"),
        ({"b": 1, "a": 2}, "2200000000000000020100000000000000016103010201000000000000000162030101"),
        (
            np.array([[1, 2], [3, 4]], np.int32),
            "1100000000000000033c693402000000000000000200000000000000020000000000000010"
            "01000000020000000300000004000000",
        ),
        (Image.fromarray(RED), "10000000000000000352474200000002000000010000000000000008ff0000ffff0000ff"),
        (ImageData(RED), "10000000000000000352474200000002000000010000000000000008ff0000ffff0000ff"),
        (np.int64(-1), "0301ff"),
        (np.float32(1.5), "043ff8000000000000"),
        (np.bool_(True), "0501"),
    ],
)
def test_canonical_bytes(value, expected):
    assert canonical_bytes(value).hex() == expected


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Image.fromarray(RED), RED_DIGEST),
        (ImageData(RED), RED_DIGEST),
        (ImageData(RED.transpose(1, 0, 2)), "974e478ede3158269494cf1c676875b1443c1e590d427514b6977da24cffbcd4"),
        (
            np.arange(6, dtype=np.uint8).reshape(2, 3),
            "0049d90003eef116426364cc777bd5e30a9a764bf360a0f56a55b5653c4edda7",
        ),
        (
            np.arange(6, dtype=np.uint8).reshape(3, 2),
            "61e4a944259aeaaf07efeb1b00769ec18ed9d03fcf823492f3ae6480c20565bb",
        ),
        (VideoData([], META, "a" * 64), "08be2f9fd3243ed808ffbe407b7c1b21569c717848190b5a00ada2288e9fc4e4"),
        (
            VideoData([np.zeros((2, 2, 3), np.uint8)] * 3, META),
            "0acf86d68b18490d4b7a0eac1c35d00935737a975b7bbaae02fba6a7a6a6e1c0",
        ),
        (AudioData(np.zeros(4, np.float32), 16000), "eae622a795a764d5e010187bf5c6fb9fe2c61e757d892bdac7300900c3836fad"),
    ],
)
def test_item_digests(item, expected):
    assert item_digest(item) == expected


def test_digest_with_a_uuid():
    expected = "f490c70f586d85c38725d21f27840ce66656214fa192778696ef23ccac57eff0"
    assert item_digest(ImageData(RED), uuid="u1") == expected
    assert item_digest(ImageData(RED), uuid="u2") != expected
    assert item_digest(ImageData(RED.transpose(1, 0, 2)), uuid="u1") != expected, "the content still counts"


def test_digest_as_words():
    words = [-455257875, 238860617, -971651086, 1499699114, -1387705506, -242229534, -1447951157, -1729214063]
    assert hexdigest_to_int32(RED_DIGEST) == words
    assert int32_to_hexdigest(words) == RED_DIGEST


@pytest.mark.parametrize("digest", ["", "ab", RED_DIGEST + "00"])
def test_digests_of_another_length_are_refused(digest):
    with pytest.raises(ValueError, match="64 hex"):
        hexdigest_to_int32(digest)


@pytest.mark.parametrize("words", [[1, 2, 3], "12345678", [2**31] + [0] * 7])
def test_words_of_another_form_are_refused(words):
    with pytest.raises(ValueError, match=r"int32|32-bit"):
        int32_to_hexdigest(words)


def test_options_hash():
    assert mm_processor_kwargs_hash({}) == "78215eea8f8ec3aabf08d64004f84cdc898ffd2b8d708bc53778c2c4644acc48"
    assert mm_processor_kwargs_hash(None) == mm_processor_kwargs_hash({})
    assert mm_processor_kwargs_hash({"b": 1, "a": 2}) == mm_processor_kwargs_hash({"a": 2, "b": 1})
    assert mm_processor_kwargs_hash({"a": object()}) is None


# --- video and audio ---


def frames(*values: int) -> np.ndarray:
    return np.stack([np.full((2, 2, 3), value, np.uint8) for value in values])


def test_a_source_digest_stands_for_the_frames():
    class Unread:
        def __iter__(self):
            raise AssertionError("frames were read")

    assert item_digest(VideoData(Unread(), META, "b" * 64)) == item_digest(VideoData(frames(1, 2, 3), META, "b" * 64))
    with pytest.raises(AssertionError, match="were read"):
        item_digest(VideoData(Unread(), META))


def test_every_frame_counts_without_a_source_digest():
    digests = {item_digest(VideoData(frames(*values), META)) for values in ((1, 2, 3), (1, 2, 4), (1, 3, 2), (0, 2, 3))}
    assert len(digests) == 4


def test_everything_about_a_clip_is_in_its_digest():
    base = VideoMetadata(total_num_frames=3, fps=30.0, frames_indices=(0, 1, 2), duration=1.0)
    sound = AudioData(np.zeros(4, np.float32), 16000)
    clips = [
        VideoData(frames(1, 2, 3), base),
        VideoData(frames(1, 2, 3), VideoMetadata(3, 30.0, (0, 1, 1), 1.0)),
        VideoData(frames(1, 2, 3), VideoMetadata(3, 24.0, (0, 1, 2), 1.0)),
        VideoData(frames(1, 2, 3), VideoMetadata(3, None, (0, 1, 2), 1.0)),
        VideoData(frames(1, 2, 3), VideoMetadata(4, 30.0, (0, 1, 2), 1.0)),
        VideoData(frames(1, 2, 3), base, "a" * 64),
        VideoData(frames(1, 2, 3), base, "b" * 64),
        VideoData(frames(1, 2, 3), base, audio=sound),
    ]
    assert len({item_digest(clip) for clip in clips}) == len(clips)
    assert item_digest(clips[0]) == item_digest(VideoData(list(frames(1, 2, 3)), META))


def test_two_frames_and_one_are_not_one_and_two():
    both = VideoData([frames(1, 2), frames(3)], {}), VideoData([frames(1), frames(2, 3)], {})
    assert item_digest(both[0]) != item_digest(both[1])


def test_audio_depends_on_samples_and_rate():
    ramp = np.arange(4, dtype=np.float32)
    items = [AudioData(ramp, 16000), AudioData(ramp, 8000), AudioData(ramp + 1, 16000), ramp]
    assert len({item_digest(item) for item in items}) == len(items)


# --- images ---


def test_rgb_array_and_pil_image_share_a_digest_whatever_the_strips():
    pixels = np.random.default_rng(0).integers(0, 256, (700, 431, 3), dtype=np.uint8)
    rgba = np.dstack([pixels, np.full((700, 431), 255, np.uint8)]).tobytes()
    head = b"\x10" + (3).to_bytes(8, "big") + b"RGB" + (431).to_bytes(4, "big") + (700).to_bytes(4, "big")
    expected = blake3(b"trtllm.mm.hash.v1" + head + len(rgba).to_bytes(8, "big") + rgba).hexdigest()
    assert item_digest(ImageData(pixels)) == expected
    assert item_digest(Image.fromarray(pixels)) == expected
    assert item_digest(ImageData(pixels[:, ::-1][:, ::-1])) == expected, "strided views hash like their copies"


def test_images_are_uint8_rgb():
    for wrong in (np.zeros((2, 2, 4), np.uint8), np.zeros((2, 2, 3), np.float32), np.zeros((2, 2), np.uint8)):
        with pytest.raises(ValueError, match="uint8"):
            item_digest(ImageData(wrong))


def test_hashing_is_cheaper_than_decoding():
    """A digest must not be what a request waits for: 12 megapixels take about a third of the time of their JPEG."""
    rng = np.random.default_rng(1)
    y, x = np.mgrid[0:3000, 0:4000].astype(np.float32)
    waves = np.stack([np.sin(x / 97), np.cos(y / 61), np.sin(x / 31 + y / 17)], -1) * 60 + 128
    pixels = np.clip(waves + 6 * rng.standard_normal(waves.shape, np.float32), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)

    def best_of(work, tries=9) -> float:
        times = []
        for _ in range(tries):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return min(times)

    assert best_of(lambda: item_digest(ImageData(pixels))) < best_of(lambda: Image.open(file).load())


# --- salt ---


def test_a_salt_moves_every_digest():
    items = [ImageData(RED), AudioData(np.zeros(4, np.float32), 16000), VideoData(frames(1), META)]
    for item in items:
        for uuid in (None, "u1"):
            digests = {item_digest(item, uuid, salt) for salt in (None, "", "tenant a", "tenant b")}
            assert len(digests) == 4
    assert item_digest(ImageData(RED), salt="tenant a") == item_digest(ImageData(RED.copy()), salt="tenant a")
