# SPDX-License-Identifier: Apache-2.0
"""Claim: an opened picture or clip becomes an item whose name covers what the model sees and how it was processed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from inputs_kit import PAD, ToyProcessor, plan_of

from mmjax.errors import RequestError
from mmjax.inputs.embeddings import accept_embeddings
from mmjax.inputs.hashing import ImageData, VideoData, hexdigest_to_int32, item_digest
from mmjax.inputs.items import Modality, ProcessedItem, VideoMetadata
from mmjax.inputs.prepare import prepare_prompt
from mmjax.inputs.process import media_item, patches_again, planned_item
from mmjax.media import MediaOptions, open_media

OPTIONS = MediaOptions()


@dataclass(frozen=True)
class PixelProcessor(ToyProcessor):
    """One row a pixel, at most `max_pixels`; clips show every other frame."""

    def resolve(self, modality, options):
        unknown = set(options) - {"max_pixels"}
        if unknown:
            raise RequestError(f"unknown processor option {sorted(unknown)[0]}")
        return {"max_pixels": 64, **options}

    def sample_frames(self, metadata, options):
        whole = metadata.frames_indices == tuple(range(metadata.total_num_frames))
        return metadata.frames_indices[::2] if whole else metadata.frames_indices

    def _plan(self, modality, pixels, options):
        if pixels > 100:
            raise RequestError(f"{pixels} pixels exceed 100")
        rows = min(pixels, options["max_pixels"])
        return plan_of([self.placeholder_id[modality]] * rows, None, modality, options=options, warnings=("planned",))

    def plan_image(self, height, width, options):
        return self._plan(Modality.IMAGE, height * width, options)

    def plan_video(self, metadata, height, width, options):
        return self._plan(Modality.VIDEO, len(self.sample_frames(metadata, options)) * height * width, options)

    def image(self, rgb, options):
        plan = self.plan_image(*rgb.shape[:2], options)
        return ProcessedItem(plan, rgb.reshape(-1, 3)[: plan.rows].copy())

    def video(self, frames, metadata, options):
        plan = self.plan_video(metadata, *frames.shape[1:3], options)
        return ProcessedItem(plan, frames.reshape(-1, 3)[: plan.rows].copy())


PIXELS = PixelProcessor()
RGB = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
FRAMES = np.arange(6 * 2 * 2 * 3, dtype=np.uint8).reshape(6, 2, 2, 3)


def picture(pixels=RGB, item=0):
    return open_media(Modality.IMAGE, pixels, OPTIONS, item)


def clip_source(frames=FRAMES, fps=2.0):
    return open_media(Modality.VIDEO, frames, OPTIONS, 0, metadata={"fps": fps})


def prepared(*items):
    return prepare_prompt(np.array([PAD] * len(items), np.int32), items, PIXELS, vocab_size=100)


def test_a_picture_is_named_by_its_pixels():
    item = media_item(picture(), PIXELS, uuid="u", salt="s")
    assert item.digest == item_digest(ImageData(RGB), "u", "s")
    assert (item.plan.rows, item.plan.options, item.uuid) == (20, {"max_pixels": 64}, "u")
    np.testing.assert_array_equal(item.patches, RGB.reshape(-1, 3))


def test_defaults_spelled_out_share_a_key_and_other_options_do_not():
    first, halved, third, spelled = prepared(
        media_item(picture(), PIXELS),
        media_item(picture(), PIXELS, {"max_pixels": 10}),
        media_item(picture(), PIXELS),
        media_item(picture(), PIXELS, {"max_pixels": 64}),
    ).items
    assert first.cache_key == third.cache_key == spelled.cache_key
    assert halved.cache_key != first.cache_key
    assert (first.plan.rows, halved.plan.rows) == (20, 10)


def test_a_clip_is_named_by_its_sampled_frames_and_rate():
    item = media_item(clip_source(), PIXELS)
    slower = media_item(clip_source(fps=1.0), PIXELS)
    cut = media_item(clip_source(FRAMES[:5]), PIXELS)
    assert len({item.digest, slower.digest, cut.digest}) == 3
    assert item.digest == item_digest(VideoData(FRAMES[::2], VideoMetadata(6, 2.0, (0, 2, 4), 3.0)))
    unseen = FRAMES.copy()
    unseen[1] = 9
    assert media_item(clip_source(unseen), PIXELS).digest == item.digest


def test_a_header_is_enough_to_plan():
    for source, rows in ((picture(), 20), (clip_source(), 12)):
        planned, full = planned_item(source, PIXELS, uuid="u"), media_item(source, PIXELS)
        assert planned.plan.rows == full.plan.rows == rows
        assert (planned.patches, planned.digest, planned.uuid) == (None, None, "u")
        assert planned.plan.warnings == full.plan.warnings == ("planned",)


def test_patches_can_be_made_again():
    placed = prepared(media_item(picture(), PIXELS, {"max_pixels": 7})).items[0]
    before, placed.patches = placed.patches, None
    np.testing.assert_array_equal(patches_again([placed], PIXELS)[0], before)


def test_errors_name_the_item():
    with pytest.raises(RequestError, match="item 3: unknown processor option zoom"):
        media_item(picture(item=3), PIXELS, {"zoom": 1})
    large = picture(np.zeros((20, 20, 3), np.uint8), item=2)
    for make in (media_item, planned_item):
        with pytest.raises(RequestError, match="item 2: 400 pixels exceed 100"):
            make(large, PIXELS)
    sound = open_media(Modality.AUDIO, (np.zeros(4, np.float32), 16000), OPTIONS, 1)
    with pytest.raises(RequestError, match="item 1: this model takes no audio"):
        media_item(sound, PIXELS)


# --- rows supplied by the caller ---


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, "bfloat16"])
def test_floating_rows_are_cast(kind):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rows = np.ones((3, 4), getattr(ml_dtypes, kind) if isinstance(kind, str) else kind)
    taken = accept_embeddings(rows, 4, rows=3)
    assert (taken.dtype, taken.shape) == (np.float32, (3, 4))
    assert (taken == 1).all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((3, 3), np.float32), r"item 5: embeddings must have shape \[3, 4\], got \[3, 3\]"),
        (np.zeros((2, 4), np.float32), r"\[3, 4\], got \[2, 4\]"),
        (np.zeros((1, 3, 4), np.float32), r"got \[1, 3, 4\]"),
        (np.zeros((1, 1, 3, 4), np.float32), r"got \[1, 1, 3, 4\]"),
        (np.zeros(12, np.float32), r"got \[12\]"),
        (np.zeros((0, 4), np.float32), r"got \[0, 4\]"),
        (np.zeros((3, 4), np.int32), "floating point, got int32"),
        (np.zeros((3, 4), np.complex64), "floating point, got complex64"),
        (np.full((3, 4), np.nan, np.float32), "not finite"),
        (np.full((3, 4), np.inf, np.float32), "not finite"),
        ([[1.0] * 4, [1.0]], "can't be read as an array"),
        ("rows", r"got \[\]"),
    ],
)
def test_other_rows_are_refused(rows, message):
    with pytest.raises(RequestError, match=message):
        accept_embeddings(rows, 4, rows=3, item=5)


def test_deepstack_widths_count():
    with pytest.raises(RequestError, match=r"\[rows, 16\], got \[3, 4\]"):
        accept_embeddings(np.zeros((3, 4), np.float32), 16)


def test_rows_have_an_identity_of_their_own():
    rows = np.ones((3, 4), np.float32)
    digests = {item_digest(rows), item_digest(rows + 1), item_digest(rows.reshape(4, 3))}
    assert len(digests) == 3
    assert len(hexdigest_to_int32(item_digest(rows))) == 8
