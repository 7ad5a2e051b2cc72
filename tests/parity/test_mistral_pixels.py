# SPDX-License-Identifier: Apache-2.0
"""Claim: pictures of families with a Pixtral tower give transformers' sizes, spans and, exactly, its pixel values."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

import numpy as np
import pytest
import tiny
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_kit import FAMILIES, TOWERS, cut
from PIL import Image
from pixels_kit import noise, pixel_values
from tiny_families import lighton_ocr
from tiny_families.mistral import ID, MERGE, PATCH, tokenizer
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

from mmjax.errors import CheckpointError, RequestError
from mmjax.inputs.items import Modality, VideoMetadata
from mmjax.media import ImageSource, MediaOptions
from mmjax.models.lighton_ocr.processing import LightOnOcrProcessor
from mmjax.models.pixtral_shared.processing import PixtralProcessor
from mmjax.models.pixtral_shared.sizes import stretched_size

EDGE = 168
SIZES = [(1, 1), (1, 2), (28, 28), (29, 27), (97, 131), (168, 168), (169, 3), (5, 160), (1, 168), (640, 427), (16, 900)]


@dataclass(frozen=True)
class Vision:
    """The part of a config that a processor reads."""

    patch_size: int
    merge: int


@dataclass(frozen=True)
class Config:
    vision: Vision
    image_token_id: int = ID["[IMG]"]


def processor(folder, family: str, joint: dict | None = None, **pictures) -> PixtralProcessor:
    """Ours for a checkpoint whose image processor has these settings; `joint` are those of the processor around it."""
    (lighton_ocr.tokenizer() if family == "lighton_ocr" else tokenizer()).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": EDGE}, **pictures}))
    if joint is not None:
        (folder / "processor_config.json").write_text(json.dumps(joint))
    vision = Vision(PATCH[family], MERGE[family])
    if family == "lighton_ocr":
        return LightOnOcrProcessor.from_checkpoint(Config(vision, tiny.ID[lighton_ocr.IMAGE]), folder)
    return PixtralProcessor.from_checkpoint(Config(vision), folder)


def reference(family: str, **pictures) -> transformers.ProcessorMixin:
    if family == "lighton_ocr":
        return lighton_ocr.make_processor({"size": {"longest_edge": EDGE}, **pictures}, PATCH[family], MERGE[family])
    image = transformers.PixtralImageProcessor(**{"size": {"longest_edge": EDGE}, **pictures})
    return transformers.PixtralProcessor(image, tokenizer(), patch_size=PATCH[family], spatial_merge_size=MERGE[family])


@pytest.fixture(scope="module", params=TOWERS)
def pair(request, tmp_path_factory):
    """(family, our processor, transformers')."""
    family = request.param
    own = {"patch_size": PATCH[family]} if family == "lighton_ocr" else {}
    return family, processor(tmp_path_factory.mktemp(family), family, **own), reference(family, **own)


def assert_parity(pair, picture: Image.Image, rgb: np.ndarray, **options) -> None:
    """Transformers sees `picture`, we see `rgb`: grids, spans and values must be equal."""
    family, ours, theirs = pair
    image, merge = theirs.image_token, MERGE[family]
    expected = theirs(text=[image], images=[[picture]], return_tensors="np", add_special_tokens=False, **options)
    height, width = (int(side) for side in expected["image_sizes"][0])
    grid = (height // PATCH[family], width // PATCH[family])
    if min(grid) < merge:  # no row, where transformers' model fails
        with pytest.raises(RequestError, match=f"too thin: it has {grid[0]} x {grid[1]} patches"):
            ours.image(rgb, options)
        return
    item = ours.image(rgb, options)
    assert item.plan.grid == (1, *grid)
    assert item.plan.contexts[0] == grid[0] * grid[1]
    assert item.plan.encoder_tokens == len(item.patches) == -(-item.plan.contexts[0] // merge**2) * merge**2
    assert item.plan.rows == grid[0] // merge * (grid[1] // merge)
    assert item.plan.span_ids.tolist() == expected["input_ids"][0].tolist()
    np.testing.assert_array_equal(item.plan.span_embed, item.plan.span_ids == theirs.image_token_id)
    assert item.plan.span_embed.sum() == item.plan.rows
    wanted = cut(family, expected["pixel_values"][0], (height, width))
    assert np.abs(pixel_values(ours, item)[: len(wanted)] - wanted).max() == 0.0
    assert not item.patches[len(wanted) :].any()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pictures(pair, size):
    rgb = noise(0, *size, 3)
    assert_parity(pair, Image.fromarray(rgb), rgb)


def test_size_in_the_request(pair):
    rgb = noise(2, 120, 90, 3)
    assert_parity(pair, Image.fromarray(rgb), rgb, size={"longest_edge": 60})
    ours = pair[1]
    plans = [
        ours.plan_image(120, 90, options)
        for options in (
            {"longest_edge": 60},
            {"size": {"longest_edge": 60}},
            {"images_kwargs": {"size": {"longest_edge": 60}}},
        )
    ]
    assert [plan.options for plan in plans] == [{"longest_edge": 60}] * 3
    assert len({plan.grid for plan in plans}) == 1


def _modes() -> dict[str, Image.Image]:
    rng = np.random.default_rng(3)
    rgba = Image.fromarray(rng.integers(0, 256, (57, 83, 4), dtype=np.uint8), "RGBA")
    return {
        "rgba": rgba,
        "grey": rgba.convert("L"),
        "grey with alpha": rgba.convert("LA"),
        "one bit": rgba.convert("1"),
        "palette": rgba.convert("RGB").quantize(32),
        "cmyk": rgba.convert("RGB").convert("CMYK"),
    }


@pytest.mark.parametrize("mode", _modes(), ids=str)
def test_colour_modes(pair, mode):
    picture = _modes()[mode]
    if picture.has_transparency_data and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("transformers before 5.24 drops opacity instead of compositing")
    assert_parity(pair, picture, ImageSource.open(picture, MediaOptions()).decode())


@pytest.mark.parametrize(
    "variant",
    [
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_normalize": False, "do_rescale": False},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.125]},
        {"resample": 2},
        {"size": {"longest_edge": 61}},
        {"size": 90},
        {"size": {"height": 90, "width": 90}},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_settings(tmp_path, family, variant):
    rgb = noise(5, 90, 140, 3)
    pair = family, processor(tmp_path, family, **variant), reference(family, **variant)
    assert_parity(pair, Image.fromarray(rgb), rgb)


def test_the_size_of_lighton_ocr_may_be_a_square(tmp_path):
    rgb, square = noise(5, 90, 140, 3), {"patch_size": 14, "size": {"height": 90, "width": 90}}
    pair = "lighton_ocr", processor(tmp_path, "lighton_ocr", **square), reference("lighton_ocr", **square)
    assert_parity(pair, Image.fromarray(rgb), rgb)


@pytest.mark.parametrize("patch_size", [28, 42, {"height": 14, "width": 14}], ids=str)
def test_sides_are_multiples_of_the_image_processors_own_patch(tmp_path, patch_size):
    """Of LightOnOCR; the other families round to merge blocks whatever it says."""
    rgb = noise(6, 90, 140, 3)
    ours = processor(tmp_path, "lighton_ocr", patch_size=patch_size)
    theirs = reference("lighton_ocr", patch_size=patch_size)
    assert_parity(("lighton_ocr", ours, theirs), Image.fromarray(rgb), rgb)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "patch_size must be a multiple of the tower's patches, 14, got 16"),
        ({"patch_size": {"height": 14, "width": 28}}, "patch_size must be a multiple"),
        ({"patch_size": 14, "size": {"height": 100, "width": 90}}, "size must be {'longest_edge': pixels}"),
        ({"patch_size": 14, "do_resize": False}, "do_resize is false"),
        ({"patch_size": 14, "do_center_crop": True}, "do_center_crop is true"),
        ({"patch_size": 14, "joint": {"spatial_merge_size": 1}}, "spatial_merge_size is 1, but config.json says 2"),
    ],
    ids=str,
)
def test_files_of_lighton_ocr_that_cannot_be_followed(tmp_path, files, message):
    with pytest.raises(CheckpointError, match=message):
        processor(tmp_path, "lighton_ocr", **files)


def test_lighton_ocr_needs_the_token_of_its_config(tmp_path):
    processor(tmp_path, "lighton_ocr", patch_size=14)
    with pytest.raises(CheckpointError, match="no added token 300"):
        LightOnOcrProcessor.from_checkpoint(Config(Vision(14, 2), 300), tmp_path)


def test_class_defaults(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    ours = PixtralProcessor.from_checkpoint(Config(Vision(16, 1)), tmp_path)
    theirs = transformers.PixtralProcessor(transformers.PixtralImageProcessor(), tokenizer())
    rgb = noise(1, 120, 1100, 3)
    assert_parity(("pixtral", ours, theirs), Image.fromarray(rgb), rgb)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([14, 16, 28]), st.integers(1, 1600))
def test_sizes(height, width, factor, longest_edge):
    expected = get_resize_output_image_size(
        np.empty((height, width, 3), np.uint8), longest_edge, factor, "channels_last"
    )
    if min(expected) == 0:
        with pytest.raises(RequestError, match="too thin"):
            stretched_size(height, width, factor, longest_edge)
    else:
        assert stretched_size(height, width, factor, longest_edge) == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 2000))
def test_no_picture_exceeds_the_largest(pair, height, width):
    _, ours, _ = pair
    most = ours.max_tokens_per_item()[Modality.IMAGE]
    with contextlib.suppress(RequestError):  # too thin
        plan = ours.plan_image(height, width, {})
        assert plan.encoder_tokens <= most
        assert len(plan.contexts) <= ours.worst_contexts(plan.encoder_tokens)
    square = ours.plan_image(EDGE, EDGE, {})
    assert square.encoder_tokens == most
    assert len(square.contexts) == 1


def test_what_is_strongly_shrunk_is_told(pair):
    _, ours, _ = pair
    assert ours.plan_image(300, 200, {}).warnings == ()
    (warning,) = ours.plan_image(3000, 2000, {}).warnings
    assert "3000 x 2000" in warning
    assert "longest_edge" in warning


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pixels": 9}, "unknown processor option max_pixels; known are longest_edge, size"),
        ({"images_kwargs": 9}, "images_kwargs must be a mapping of options, got 9"),
        ({"size": 5}, "size must be"),
        ({"size": {"shortest_edge": 5}}, "size must be"),
        ({"longest_edge": 0}, "longest_edge must be a positive integer, got 0"),
        ({"longest_edge": 2.5}, "longest_edge must be a positive integer, got 2.5"),
    ],
    ids=str,
)
def test_options_that_are_refused(pair, options, message):
    with pytest.raises(RequestError, match=message):
        pair[1].plan_image(40, 40, options)


def test_there_is_no_video(pair):
    _, ours, _ = pair
    metadata, frames = VideoMetadata(2, 1.0, (0, 1)), np.zeros((2, 28, 28, 3), np.uint8)
    for call in (
        lambda: ours.resolve(Modality.VIDEO, {}),
        lambda: ours.sample_frames(metadata, {}),
        lambda: ours.plan_video(metadata, 28, 28, {}),
        lambda: ours.video(frames, metadata, {}),
    ):
        with pytest.raises(RequestError, match="this family has no video; it takes images"):
            call()


def test_positions_count_the_prompt(pair):
    positions, delta = pair[1].positions(np.zeros(7, np.int32), [])
    assert (positions.tolist(), delta) == ([list(range(7))], 0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"do_resize": False}, "do_resize is false"),
        ({"do_center_crop": True}, "do_center_crop is true"),
        ({"size": {"shortest_edge": 100}}, "size must be"),
        ({"size": {"height": 100, "width": 90}}, "size must be"),
        ({"resample": 1}, "resample must be"),
        ({"joint": {"patch_size": 16}}, "patch_size is 16, but config.json says 14"),
        ({"joint": {"spatial_merge_size": 1}}, "spatial_merge_size is 1, but config.json says 2"),
        ({"joint": {"image_break_token": "[ROW]"}}, r"no token '\[ROW\]', the image_break_token"),
        ({"joint": {"image_token": "[INST]"}}, r"\[INST\] is token 259, config.json says 263"),
    ],
    ids=str,
)
def test_files_that_cannot_be_followed(tmp_path, files, message):
    with pytest.raises(CheckpointError, match=message):
        processor(tmp_path, "mistral3", **files)


def test_tokens_come_from_either_file(tmp_path):
    """Older exports list them in tokenizer_config.json alone."""
    joint = {"image_break_token": "[INST]", "image_end_token": "[/INST]"}
    assert processor(tmp_path, "mistral3", joint).special_ids == (ID["[INST]"], ID["[/INST]"])
    tokens = {str(number): {"content": content} for content, number in ID.items()}
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    config = Config(Vision(14, 2))
    assert PixtralProcessor.from_checkpoint(config, tmp_path).special_ids == (ID["[INST]"], ID["[/INST]"])
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="lists added tokens"):
        PixtralProcessor.from_checkpoint(config, tmp_path)
