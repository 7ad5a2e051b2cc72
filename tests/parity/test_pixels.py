# SPDX-License-Identifier: Apache-2.0
"""Claim: pixel values equal those of transformers' default (torchvision) processors exactly, sizes and all."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from pixels_kit import assert_image_parity, assert_video_parity, noise, processor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from mmjax.errors import CheckpointError, RequestError
from mmjax.inputs.items import Modality, VideoMetadata
from mmjax.media import ImageSource, MediaOptions
from mmjax.models.images.resize import resize
from mmjax.models.qwen_shared.sizes import smart_resize

SMALL = {"shortest_edge": 4 * 784, "longest_edge": 36 * 784}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return processor(tmp_path_factory.mktemp("small"), preprocessor_config={"size": SMALL})


@pytest.fixture(scope="module")
def theirs():
    return transformers.Qwen2VLImageProcessor(size=dict(SMALL))


@pytest.fixture(scope="module")
def their_videos():
    return transformers.Qwen2VLVideoProcessor(size=dict(SMALL))


SIZES = [(1, 1), (1, 2), (2, 1), (3, 22), (28, 28), (70, 70), (97, 131), (133, 201), (200, 1), (5, 999), (640, 427)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pictures(ours, theirs, size):
    rgb = noise(0, *size, 3)
    assert_image_parity(ours, theirs, Image.fromarray(rgb), rgb)


def test_class_defaults(tmp_path):
    rgb = noise(1, 300, 401, 3)
    assert_image_parity(processor(tmp_path), transformers.Qwen2VLImageProcessor(), Image.fromarray(rgb), rgb)


def test_size_in_the_request(ours, theirs):
    rgb = noise(2, 120, 90, 3)
    size = {"shortest_edge": 784, "longest_edge": 9 * 784}
    assert_image_parity(ours, theirs, Image.fromarray(rgb), rgb, size=size)


def _modes() -> dict[str, Image.Image]:
    rng = np.random.default_rng(3)
    rgba = Image.fromarray(rng.integers(0, 256, (57, 83, 4), dtype=np.uint8), "RGBA")
    palette = rgba.convert("RGB").quantize(32)
    clear = palette.copy()
    clear.info["transparency"] = 3
    return {
        "rgba": rgba,
        "grey": rgba.convert("L"),
        "grey with alpha": rgba.convert("LA"),
        "one bit": rgba.convert("1"),
        "palette": palette,
        "palette with a clear colour": clear,
        "cmyk": rgba.convert("RGB").convert("CMYK"),
    }


@pytest.mark.parametrize("mode", _modes(), ids=str)
def test_colour_modes(ours, theirs, mode):
    picture = _modes()[mode]
    if picture.has_transparency_data and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("transformers before 5.24 drops opacity instead of compositing")
    assert_image_parity(ours, theirs, picture, ImageSource.open(picture, MediaOptions()).decode())


def test_orientation_is_applied_before_sizes(ours, theirs):
    rgb = noise(4, 60, 118, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG", exif=exif)
    source = ImageSource.open(file.getvalue(), MediaOptions())
    assert source.size == (118, 60)
    upright = np.ascontiguousarray(np.rot90(rgb, -1))
    assert_image_parity(ours, theirs, Image.fromarray(upright), source.decode())


@pytest.mark.parametrize(
    "variant",
    [
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_normalize": False, "do_rescale": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.125]},
        {"resample": 2},
    ],
    ids=str,
)
def test_other_settings(tmp_path, variant):
    rgb = noise(5, 90, 140, 3)
    reference = transformers.Qwen2VLImageProcessor(size=dict(SMALL), **variant)
    video = {"video_preprocessor_config": {"size": SMALL, **variant}}
    mine = processor(tmp_path, preprocessor_config={"size": SMALL, **variant}, **video)
    assert_image_parity(mine, reference, Image.fromarray(rgb), rgb)


def torchvision_resize(image: np.ndarray, rows: int, columns: int, kind: str) -> np.ndarray:
    planes = torch.from_numpy(image).permute(2, 0, 1)[None].contiguous()
    mode = getattr(InterpolationMode, kind.upper())
    return tv.resize(planes, [rows, columns], interpolation=mode, antialias=True)[0].numpy()


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 64)] * 4),
    kind=st.sampled_from(["bicubic", "bilinear"]),
    seed=st.integers(0, 9),
)
def test_resize_equals_torchvision(sizes, kind, seed):
    height, width, rows, columns = sizes
    assume(rows > 1 or columns > 1)  # PyTorch fails an assertion of its own
    image = noise(seed, height, width, 3)
    np.testing.assert_array_equal(resize(image, rows, columns, kind), torchvision_resize(image, rows, columns, kind))


@pytest.mark.parametrize("target", [(60, 80), (120, 161), (599, 801), (900, 900), (600, 90)], ids=str)
def test_resize_of_larger_pictures(target):
    """Strong reductions need more fraction bits than float32 holds, and strips that do not divide the sides."""
    image = noise(6, 600, 801, 3)
    np.testing.assert_array_equal(resize(image, *target), torchvision_resize(image, *target, "bicubic"))


# height x width: sides and rows at factor 28, 3,136 to 1,003,520 pixels; at factor 32, 65,536 to 16,777,216 pixels.
RESIZE_TABLE = [
    ((1, 1), (56, 56, 4), (256, 256, 64)),
    ((2, 1), (84, 56, 6), (384, 192, 72)),
    ((1, 2), (56, 84, 6), (192, 384, 72)),
    ((1, 200), (28, 812, 29), (32, 3648, 114)),
    ((3, 22), (28, 168, 6), (96, 704, 66)),
    ((13, 300), (28, 280, 10), (64, 1248, 78)),
    ((13, 2599), (28, 812, 29), (32, 3648, 114)),
    ((15, 300), (28, 308, 11), (64, 1152, 72)),
    ((26, 28), (56, 84, 6), (256, 288, 72)),
    ((70, 70), (56, 56, 4), (256, 256, 64)),
    ((98, 98), (112, 112, 16), (256, 256, 64)),
    ((332, 27), (336, 28, 12), (928, 96, 87)),
    ((257, 27), (252, 28, 9), (800, 96, 75)),
    ((305, 30), (308, 28, 11), (832, 96, 78)),
    ((690, 15420), (196, 4732, 1183), (704, 15424, 10604)),
    ((1944, 2592), (840, 1148, 1230), (1952, 2592, 4941)),
    ((2160, 3840), (728, 1316, 1222), (2176, 3840, 8160)),
]


@pytest.mark.parametrize(("size", "at28", "at32"), RESIZE_TABLE, ids=lambda value: "x".join(map(str, value)))
def test_known_sizes(size, at28, at32):
    for factor, limits, expected in ((28, (3136, 1003520), at28), (32, (65536, 16777216), at32)):
        rows, columns = smart_resize(*size, factor, *limits)
        assert (rows, columns, rows * columns // factor**2) == expected


@pytest.mark.parametrize(("size", "rows"), [((690, 15420), 13775), ((1944, 2592), 6417), ((2160, 3840), 10549)])
def test_limits_of_published_checkpoints(tmp_path, size, rows):
    mine = processor(tmp_path, preprocessor_config={"min_pixels": 3136, "max_pixels": 12845056})
    plan = mine.plan_image(*size, {})
    assert plan.rows == rows
    assert plan.rows * 4 <= mine.max_tokens_per_item()[Modality.IMAGE]


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (3, 601)], ids=str)
def test_extreme_aspect_is_refused(ours, size):
    with pytest.raises(RequestError, match=r"aspect ratio 20[01]"):
        ours.plan_image(*size, {})


def test_strong_shrink_is_reported(ours, tmp_path):
    mine = processor(tmp_path)
    assert any("690 x 15420" in warning for warning in mine.plan_image(690, 15420, {}).warnings)
    assert mine.plan_image(1000, 1000, {}).warnings == ()


@settings(max_examples=150, deadline=None)
@given(height=st.integers(1, 64), width=st.integers(1, 64), factor=st.sampled_from([28, 32]))
def test_sizes_up_to_64(height, width, factor):
    least, most = (3136, 1003520) if factor == 28 else (65536, 16777216)
    rows, columns = smart_resize(height, width, factor, least, most)
    assert rows % factor == columns % factor == 0
    assert least <= rows * columns <= most


class TestVideos:
    @pytest.mark.parametrize("count", range(1, 10))
    def test_frame_counts(self, ours, their_videos, count):
        """An odd last frame is repeated; so is a single one."""
        item = assert_video_parity(ours, their_videos, noise(count, count, 56, 56, 3), 10.0)
        assert item.plan.grid == ((count + 1) // 2, 4, 4)
        assert item.plan.contexts == (16,) * ((count + 1) // 2)
        if count % 2:
            first, second = item.patches.reshape(-1, 16, 3, 2, 196)[-1].transpose(2, 0, 1, 3)
            np.testing.assert_array_equal(first, second)

    @pytest.mark.parametrize(
        ("total", "fps", "options"),
        [
            (20, 10.0, {"fps": 2}),
            (20, 10.0, {"fps": 3.7}),
            (21, 29.97, {"fps": 1}),
            (9, 25.0, {"num_frames": 5}),
            (15, 4.0, {"num_frames": 8}),
            (7, 24.0, {"fps": 24}),
            (30, 30.0, {"fps": 10, "min_frames": 6, "max_frames": 9}),
            (12, 6.0, {"fps": 6, "do_sample_frames": False}),
        ],
        ids=str,
    )
    def test_sampling(self, ours, their_videos, total, fps, options):
        options = {"do_sample_frames": True, **options}
        frames = noise(total, total, 40, 60, 3)
        assert_video_parity(ours, their_videos, frames, fps, **options)

    def test_pixel_cap_of_the_whole_clip(self, tmp_path):
        config = {"size": {"shortest_edge": 784, "longest_edge": 36 * 784}, "max_video_tokens": 60}
        reference = transformers.Qwen2VLVideoProcessor(**config)
        mine = processor(tmp_path, video_preprocessor_config=config)
        item = assert_video_parity(mine, reference, noise(0, 9, 150, 200, 3), 5.0, cap_pixels_per_frame=True)
        assert item.plan.rows < mine.plan_video(VideoMetadata(9, 5.0, tuple(range(9))), 150, 200, {}).rows

    def test_unknown_rate_counts_as_24(self, ours, their_videos):
        item = assert_video_parity(ours, their_videos, noise(1, 4, 56, 56, 3), None)
        assert item.plan.seconds_per_step == 2 / 24
        assert any("24" in warning for warning in item.plan.warnings)

    def test_sampling_that_the_reference_can_not_do(self, ours):
        """One frame under sampling, and no rule to sample by."""
        one = VideoMetadata(1, 10.0, (0,))
        assert ours.plan_video(one, 56, 56, {"fps": 1}).grid == (1, 4, 4)
        many = VideoMetadata(6, 10.0, tuple(range(6)))
        assert ours.plan_video(many, 56, 56, {"do_sample_frames": True}).grid == (3, 4, 4)

    def test_frames_that_are_a_choice_already_stay(self, ours):
        chosen = VideoMetadata(100, 25.0, (0, 30, 60, 90))
        plan = ours.plan_video(chosen, 56, 56, {"fps": 1})
        assert plan.grid == (2, 4, 4)
        assert plan.seconds_per_step == 2 / (4 / 100 * 25.0)

    def test_long_clips_need_sampling(self, ours):
        clip = VideoMetadata(769, 25.0, tuple(range(769)))
        with pytest.raises(RequestError, match="769 frames, more than max_frames=768"):
            ours.plan_video(clip, 56, 56, {})
        assert ours.plan_video(clip, 56, 56, {"fps": 1}).grid[0] == 15


class TestOptions:
    def test_equal_choices_resolve_equally(self, ours):
        default = ours.resolve(Modality.IMAGE, {})
        spelled = ours.resolve(Modality.IMAGE, {"min_pixels": 3136, "max_pixels": 28224})
        assert (
            default == spelled == ours.resolve(Modality.IMAGE, {"size": SMALL}) == ours.resolve(Modality.IMAGE, default)
        )
        assert ours.resolve(Modality.IMAGE, {"fps": 2, "images_kwargs": {"max_pixels": 9800}})["max_pixels"] == 9800
        for options in ({}, {"fps": 2}, {"num_frames": 8}, {"do_sample_frames": True}):
            once = ours.resolve(Modality.VIDEO, options)
            assert ours.resolve(Modality.VIDEO, once) == once

    def test_smaller_limit_gives_fewer_rows(self, tmp_path):
        mine = processor(tmp_path)
        assert mine.plan_image(196, 196, {}).rows == 49
        smaller = mine.plan_image(196, 196, {"max_pixels": 9800})
        assert (smaller.rows, smaller.grid) == (9, (1, 6, 6))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"colour": 1}, "unknown processor option colour"),
            ({"videos_kwargs": {"colour": 1}}, "unknown processor option colour"),
            ({"videos_kwargs": "fps"}, "videos_kwargs must be a mapping of options, got 'fps'"),
            ({"max_pixels": 0}, "max_pixels must be a positive integer"),
            ({"min_pixels": 9e3}, "min_pixels must be a positive integer"),
            ({"min_pixels": 50000}, "min_pixels=50000 exceeds max_pixels=28224"),
            ({"size": {"shortest_edge": 4}}, "size must be"),
            ({"fps": float("nan")}, "fps must be a positive number"),
            ({"fps": 2, "num_frames": 4}, "exclude each other"),
            ({"num_frames": 50}, "asked for 50 frames of a clip that has 6"),
        ],
        ids=str,
    )
    def test_unusable_options_are_the_callers_fault(self, ours, options, message):
        with pytest.raises(RequestError, match=message):
            ours.plan_video(VideoMetadata(6, 10.0, tuple(range(6))), 56, 56, options)


class TestSettingsFiles:
    def test_all_layouts_of_one_checkpoint_agree(self, tmp_path):
        """Flat files, files with the older names, and the nested file that transformers 5 writes."""
        reference = transformers.Qwen2VLImageProcessor(size=dict(SMALL)).to_dict()
        layouts = {
            "flat": {"preprocessor_config": {"size": SMALL}},
            "older": {"preprocessor_config": {"min_pixels": 3136, "max_pixels": 28224, "size": {"max_pixels": 1}}},
            "saved": {"preprocessor_config": json.loads(json.dumps(reference, default=str))},
            "nested": {"processor_config": {"image_processor": {"size": SMALL}, "video_processor": {"size": SMALL}}},
        }
        found = set()
        for name, files in layouts.items():
            folder = tmp_path / name
            folder.mkdir()
            mine = processor(folder, **files)
            assert mine.video_settings.max_pixels == 28224  # without a file of its own, a clip takes the images' limits
            found.add(mine.image_settings)
        assert len(found) == 1

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"patch_size": 16}, "patch_size is 16, but config.json says 14"),
            ({"do_resize": False}, "do_resize is false"),
            ({"resample": 1}, "resample must be 2"),
            ({"image_mean": [0.5]}, "image_mean must be a list of three numbers"),
            ({"size": {"shortest_edge": "x"}}, "shortest_edge must be a positive integer"),
        ],
        ids=str,
    )
    def test_what_we_can_not_follow_is_refused(self, tmp_path, values, message):
        with pytest.raises(CheckpointError, match=message):
            processor(tmp_path, preprocessor_config=values)

    def test_two_normalisations_are_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match="normalises pixels unlike"):
            processor(
                tmp_path,
                preprocessor_config={"image_std": [0.5, 0.5, 0.5]},
                video_preprocessor_config={"image_std": [0.25, 0.25, 0.25]},
            )

    def test_a_rate_and_a_number_of_frames_are_refused_together(self, tmp_path):
        with pytest.raises(CheckpointError, match="fps is 2 and num_frames is 8; only one of them can be set"):
            processor(tmp_path, preprocessor_config={}, video_preprocessor_config={"fps": 2, "num_frames": 8})
