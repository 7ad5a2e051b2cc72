# SPDX-License-Identifier: Apache-2.0
"""Claim: pictures of any size, mode and orientation are answered, and named by what the model sees of them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from llm_kit import assert_nothing_held, clip, noise, png, user
from PIL import Image

import mmjax
from mmjax.errors import MediaError, RequestError
from mmjax.inputs.content_parts import MediaPart
from mmjax.inputs.items import Modality
from mmjax.inputs.process import media_item
from mmjax.media import MediaOptions, open_media
from mmjax.media.images import ImageSource

ONE = mmjax.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(pixels: np.ndarray, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(pixels), exif=exif)


def item_of(llm, value, **options):
    return media_item(open_media("image", value, MediaOptions(**options)), llm.model.processor)


# height x width: the grid of patches under the defaults of published checkpoints' smallest sizes.
SIZES = {
    (1, 1): (1, 4, 4),
    (2, 1): (1, 6, 4),
    (1, 2): (1, 4, 6),
    (3, 22): (1, 2, 12),
    (22, 3): (1, 12, 2),
    (26, 28): (1, 4, 6),
    (332, 27): (1, 24, 2),
    (257, 27): (1, 18, 2),
    (305, 30): (1, 22, 2),
    (13, 300): (1, 2, 20),
    (70, 70): (1, 4, 4),
    (1, 200): (1, 2, 58),
    (200, 1): (1, 58, 2),
}


@pytest.mark.parametrize(("size", "grid"), SIZES.items(), ids=str)
def test_small_and_thin_pictures_are_answered(llm, size, grid):
    for picture in (noise(*size), png(noise(*size))):
        messages = user(picture, "?")
        (span,) = llm.explain(messages).spans
        assert (span.grid, span.rows) == (grid, grid[1] * grid[2] // 4)
        out = llm.chat(messages, ONE)
        assert (len(out.token_ids), out.usage.image_tokens) == (2, span.rows)
        assert len(llm.encode([picture])[0]) == span.rows
    assert llm.stats().items["items_encoded"] == 1, "bytes and array are one picture"


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_one_colour_stays_one_colour(llm, size):
    patches = item_of(llm, np.full((*size, 3), (7, 80, 200), np.uint8)).patches
    values = patches.reshape(len(patches), 3, -1)  # the frame is there twice, for a temporal step
    np.testing.assert_array_equal(values, np.broadcast_to([[[7], [80], [200]]], values.shape))


def test_the_direction_of_a_ramp_survives(llm):
    ramp = np.repeat(np.linspace(0, 255, 22).astype(np.uint8)[None, :, None], 3, axis=0).repeat(3, axis=2)
    assert ramp.shape == (3, 22, 3)
    for picture, across in ((ramp, 1), (ramp.transpose(1, 0, 2), 0)):
        item = item_of(llm, picture)
        _, rows, columns = item.plan.grid
        blocks = item.patches.reshape(rows // 2, columns // 2, 2, 2, -1).mean(axis=(2, 3, 4))
        assert (np.diff(blocks, axis=across) > 0).all()
        assert np.ptp(blocks, axis=1 - across).max() < 1


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (499, 2)], ids=str)
def test_what_is_refused_by_its_size_is_never_decoded(llm, size, monkeypatch):
    monkeypatch.setattr(ImageSource, "decode", lambda _: pytest.fail("decoded"))
    ratio = max(size) / min(size)
    with pytest.raises(RequestError, match=f"item 0: aspect ratio {ratio:g} of a picture {size[0]} high"):
        llm.chat(user(png(np.zeros((*size, 3), np.uint8)), "?"))


def test_a_strong_shrink_is_told_in_the_answer(llm):
    out = llm.chat(user(noise(690, 1542), "?"), ONE)
    assert any("690 x 1542 pixels are shrunk" in warning for warning in out.warnings)
    assert llm.chat(user(noise(200, 200), "?"), ONE).warnings == ()


# Names.


def test_a_picture_is_named_as_it_is_seen(llm):
    """A turned file is not the file without its tag; it is the picture that one sees."""
    pixels = noise(56, 112)
    digests = {orientation: item_of(llm, turned(pixels, orientation)).digest for orientation in range(10)}
    assert digests[0] == digests[1] == digests[9] == item_of(llm, pixels).digest
    assert len(set(digests.values())) == 8
    assert digests[6] == item_of(llm, np.rot90(pixels, -1)).digest
    assert item_of(llm, turned(pixels, 6)).plan.grid == (1, 8, 4)


def test_equal_pictures_share_a_name_in_any_mode_and_format(llm):
    grey = noise(56, 56)[..., :1].repeat(3, axis=2)
    doors = [grey, png(grey), Image.fromarray(grey[..., 0]), encoded(Image.fromarray(grey).convert("LA"))]
    doors += [encoded(Image.fromarray(grey), "TIFF"), np.asfortranarray(grey), grey[..., :1]]
    assert len({item_of(llm, door).digest for door in doors}) == 1
    first, *others = llm.encode(doors)
    for rows in others:
        np.testing.assert_array_equal(rows, first)
    assert llm.stats().items["items_encoded"] == 1


def test_pictures_of_equal_bytes_do_not(llm):
    """Equal buffers of other shapes; equal indices under other palettes; equal pixels on another background."""
    zeros = np.zeros(30 * 150 * 3, np.uint8)
    shapes = [zeros.reshape(30, 150, 3), zeros.reshape(150, 30, 3)]
    palettes = []
    for colour in ((255, 0, 0), (0, 0, 255)):
        image = Image.new("P", (60, 60), 0)
        image.putpalette([*colour, *[0] * 765])
        palettes.append(image)
    clear = [np.zeros((60, 60, 4), np.uint8)] * 2
    backgrounds = [{"image_background": (0, 0, 0)}, {"image_background": (255, 255, 255)}]
    for values, options in ((shapes, [{}] * 2), (palettes, [{}] * 2), (clear, backgrounds)):
        one, other = [item_of(llm, value, **own) for value, own in zip(values, options, strict=True)]
        assert one.digest != other.digest


# Broken ones.


def test_a_bad_picture_leaves_nothing_behind(llm):
    """Not under its own name either: what could be read of it is no entry, and the whole file works afterwards."""
    good = encoded(Image.fromarray(noise(90, 130)), "JPEG", quality=95)
    bad = [good[: len(good) // 2], b"", b"<html></html>", "data:image/png;base64,@@", "/nowhere/cat.jpg"]
    expected = llm.chat(user(noise(84, 140), "?"), ONE).token_ids
    llm.invalidate_caches()
    parts = [[{"type": "image", "image": value}, {"type": "text", "text": "?"}] for value in bad]
    talks = [talk for part in parts for talk in ([{"role": "user", "content": part}], user(noise(84, 140), "?"))]
    outs = llm.chat(talks, ONE)
    assert [type(out.error) for out in outs[::2]] == [MediaError] * len(bad)
    assert [out.error.item for out in outs[::2]] == [0] * len(bad)
    assert [out.token_ids for out in outs[1::2]] == [expected] * len(bad)
    assert llm.stats().items["cache"]["items"] == 1
    assert llm.chat(user(good, "?"), ONE).error is None
    assert_nothing_held(llm)


# Clips.


@pytest.mark.parametrize("frames", range(1, 7))
def test_clips_of_any_length(llm, frames):
    out = llm.chat(user((clip(frames, 56, 56), {"fps": 2.0}), "?"), ONE)
    assert out.usage.video_tokens == 4 * ((frames + 1) // 2)
    assert out.error is None


def test_rows_of_clips_are_those_of_all_their_steps(llm):
    """Grid 2 x 8 x 10 patches: 40 rows; two clips have rows of their own."""
    clips = [(clip(4, 112, 140), {"fps": 2.0}), (clip(2, 56, 84), {"fps": 2.0}), (clip(3, 56, 56), {"fps": 2.0})]
    options = {"mm_processor_kwargs": {"max_pixels": 50176}}
    spans = llm.explain(user(*clips), **options).spans
    assert [(span.grid, span.rows) for span in spans] == [((2, 8, 10), 40), ((1, 4, 6), 6), ((2, 4, 4), 8)]
    assert [len(rows) for rows in llm.encode([MediaPart(Modality.VIDEO, one) for one in clips], **options)] == [
        40,
        6,
        8,
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((clip(3, 56, 56), {"fps": 0}), "fps must be a positive number"),
        ((clip(3, 56, 56), {"fps": float("nan")}), "fps must be a positive number"),
        ((clip(3, 56, 56), {"fps": -1.0}), "fps must be a positive number"),
        ((clip(3, 56, 56), {"frames_indices": []}), "names 0 frames"),
        (clip(0, 56, 56), "0 frames"),
        ([], "0 frames"),
    ],
    ids=["zero", "nan", "negative", "no indices", "no frames", "empty list"],
)
def test_clips_that_are_none_fail_alone(llm, value, message):
    part = {"type": "video", "video": value}
    bad = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    out, neighbour = llm.chat([bad, user((clip(3, 56, 56), {"fps": None}), "?")], ONE)
    assert isinstance(out.error, MediaError)
    assert (out.error.item, message in str(out.error)) == (0, True)
    assert neighbour.error is None
    assert any("24 frames a second are assumed" in warning for warning in neighbour.warnings)


def test_frames_that_are_there_win_over_those_that_are_claimed(llm):
    metadata = {"fps": 4.0, "total_num_frames": 100, "duration": 25.0}
    source = open_media("video", clip(4, 56, 56), MediaOptions(), 0, metadata=metadata)
    assert source.metadata.total_num_frames == 4
    out = llm.chat(user((clip(4, 56, 56), metadata), "?"), ONE)
    assert out.usage.video_tokens == 8
    assert any("100" in warning for warning in out.warnings)
