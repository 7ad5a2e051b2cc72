# SPDX-License-Identifier: Apache-2.0
"""Claim: of pictures and clips Qwen3-VL sees what transformers shows it: pixels, prompt ids, positions, to the bit."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pixels_kit import Config, Vision, assert_image_parity, assert_video_parity, noise, pixel_values

from mmjax.errors import CheckpointError, RequestError
from mmjax.inputs.items import Modality, VideoMetadata
from mmjax.models.qwen3_vl.processing import Qwen3VLProcessor
from mmjax.models.qwen3_vl.sizes import clip_resize, most_clip_blocks

BLOCK = 32 * 32
HALF = [0.5, 0.5, 0.5]
PICTURES = {"size": {"shortest_edge": 4 * BLOCK, "longest_edge": 36 * BLOCK}, "image_mean": HALF, "image_std": HALF}
CLIPS = {"size": {"shortest_edge": 6 * BLOCK, "longest_edge": 96 * BLOCK}}


@dataclass(frozen=True)
class Vision3(Vision):
    patch_size: int = 16
    table_side: int = 48


@dataclass(frozen=True)
class Config3(Config):
    vision: Vision3 = Vision3()
    vision_start_token_id: int = 5
    vision_end_token_id: int = 6


CONFIG = Config3()


def processor(folder, **files) -> Qwen3VLProcessor:
    """Ours for a checkpoint with these files (`preprocessor_config={...}`)."""
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return Qwen3VLProcessor.from_checkpoint(CONFIG, folder)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint, tmp_path_factory):
    """A directory with a tokenizer and small limits."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "tokenizer.json").symlink_to(tiny_checkpoint("qwen3_vl").path / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return processor(folder, preprocessor_config=PICTURES, video_preprocessor_config=CLIPS)


@pytest.fixture(scope="module")
def theirs():
    return transformers.Qwen2VLImageProcessor(**PICTURES, patch_size=16)


@pytest.fixture(scope="module")
def their_videos():
    return transformers.Qwen3VLVideoProcessor(**CLIPS)


def clip(frames: int, fps: float | None) -> VideoMetadata:
    return VideoMetadata(frames, fps, tuple(range(frames)))


# ---- pixels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [(1, 1), (2, 1), (32, 32), (80, 80), (97, 131), (200, 1), (5, 999), (640, 427)], ids=str
)
def test_pictures(ours, theirs, size):
    rgb = noise(0, *size, 3)
    assert_image_parity(ours, theirs, Image.fromarray(rgb), rgb)


@pytest.mark.parametrize(
    ("frames", "size", "fps", "options"),
    [
        (2, (64, 64), 2.0, {}),
        (3, (64, 96), 2.0, {}),  # the last frame fills its step
        (5, (190, 250), 1.0, {}),  # over the limit of the whole clip; five frames count as four
        (12, (48, 80), 4.0, {}),  # every other frame, up to the last
        (31, (40, 60), 30.0, {}),  # at least four
        (20, (60, 40), 29.97, {"fps": 7}),
        (9, (50, 70), 10.0, {"fps": 8.5}),
        (11, (50, 70), 10.0, {"num_frames": 5, "fps": None}),
        (7, (50, 70), 25.0, {"do_sample_frames": False}),
        (4, (7, 20), 5.0, {}),  # both sides below one block
        (4, (33, 6), 5.0, {}),
        (6, (30, 700), 3.0, {}),
        (8, (120, 150), 3.0, {"cap_pixels_per_frame": True}),
        (6, (64, 64), None, {}),  # an unknown rate counts as 24
    ],
    ids=str,
)
def test_clips(ours, their_videos, frames, size, fps, options):
    assert_video_parity(ours, their_videos, noise(frames, frames, *size, 3), fps, **options)


def test_a_single_frame_fills_its_step(ours):
    """transformers refuses it; here it is shown twice, at its own time."""
    frame = noise(0, 1, 70, 90, 3)
    sampled = ours.video(noise(1, 4, 70, 90, 3), clip(4, 10.0), {"num_frames": 1})
    for item in (ours.video(frame, clip(1, 10.0), {}), sampled):
        assert item.plan.grid[0] == 1
        first, second = np.moveaxis(item.patches.reshape(len(item.patches), 3, 2, -1), 2, 0)
        np.testing.assert_array_equal(first, second)
    alike = ours.video(frame.repeat(2, axis=0), clip(2, 10.0), {})
    np.testing.assert_array_equal(ours.video(frame, clip(1, 10.0), {}).patches, alike.patches)


def test_the_least_and_the_most_frames(ours):
    """transformers takes these two from the checkpoint alone; here a request may set them too, to the same effect."""
    reference = transformers.Qwen3VLVideoProcessor(**CLIPS, min_frames=6, max_frames=7)
    frames = noise(9, 9, 50, 70, 3)
    limits = {"min_frames": 6, "max_frames": 7}
    for fps, grid_t in ((24, 4), (1, 3)):
        expected = reference(videos=[frames], video_metadata=[vars(clip(9, 10.0))], return_tensors="np", fps=fps)
        item = ours.video(frames, clip(9, 10.0), {"fps": fps, **limits})
        assert item.plan.grid == tuple(expected["video_grid_thw"][0])
        assert item.plan.grid[0] == grid_t
        assert np.abs(pixel_values(ours, item) - expected["pixel_values_videos"]).max() == 0.0


def test_frames_are_capped_by_blocks_and_by_their_share(folder, tmp_path):
    limits = {"size": {"shortest_edge": 4 * BLOCK, "longest_edge": 400 * BLOCK}, "max_video_tokens": 9}
    mine = processor(tmp_path, preprocessor_config=PICTURES, video_preprocessor_config=limits)
    mine = replace(mine, clip_text=replace(mine.clip_text, folder=folder))
    reference = transformers.Qwen3VLVideoProcessor(**limits)
    item = assert_video_parity(mine, reference, noise(0, 8, 150, 200, 3), 5.0, cap_pixels_per_frame=True)
    free = assert_video_parity(mine, reference, noise(0, 8, 150, 200, 3), 5.0)
    assert item.plan.rows <= 9 * item.plan.grid[0] < free.plan.rows


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 20), st.integers(1, 500), st.integers(1, 500), st.integers(0, 40), st.integers(41, 400))
def test_sizes_of_clips(frames, height, width, least, most):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    limits = {"factor": 32, "min_pixels": max(1, least) * BLOCK, "max_pixels": most * BLOCK}
    try:
        expected = smart_resize(frames, height, width, temporal_factor=2, **limits)
    except ValueError:
        with pytest.raises(RequestError, match="aspect ratio"):
            clip_resize(frames, height, width, temporal=2, **limits)
        return
    rows, columns = clip_resize(frames, height, width, temporal=2, **limits)
    assert (rows, columns) == expected
    if min(frames, round(frames / 2) * 2) * rows * columns <= limits["max_pixels"]:
        bound = most_clip_blocks(factor=32, temporal=2, max_pixels=limits["max_pixels"], max_frames=20)
        assert -(-frames // 2) * rows * columns // BLOCK <= bound


# ---- prompts --------------------------------------------------------------------------------------------------------

PICTURE = st.tuples(st.just("image"), st.integers(20, 150), st.integers(20, 150))
CLIP = st.tuples(
    st.just("video"),
    st.integers(2, 7),
    st.integers(20, 90),
    st.integers(20, 90),
    st.sampled_from([None, 1.0, 2.5, 3, 29.97]),
)
WORDS = st.sampled_from(["", "a", "Look: ", " and <", "<0.5 seconds>", "\n"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(WORDS, PICTURE | CLIP), min_size=1, max_size=5), WORDS)
def test_prompts_of_pictures_and_clips_in_any_order(front, parts, tail):
    """Ids, positions, pixels and the grid of everything, through each side's whole host path."""
    ours, theirs = front(parts, tail)
    assert ours.token_ids.tolist() == theirs["input_ids"][0].tolist()
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    positions, delta = front.model.model.get_rope_index(**{key: theirs[key] for key in keys if key in theirs})
    np.testing.assert_array_equal(ours.positions, positions[:, 0].numpy())
    assert ours.position_delta == int(delta)
    np.testing.assert_array_equal(ours.embed_mask, theirs["mm_token_type_ids"][0].numpy() > 0)
    table = front.processor.pixel_table()
    for modality, key in ((Modality.IMAGE, "pixel_values"), (Modality.VIDEO, "pixel_values_videos")):
        patches = [item.patches for item in ours.items if item.modality is modality]
        if patches:
            joined = np.concatenate(patches).reshape(-1, 3, patches[0].shape[1] // 3)
            values = np.stack([table[channel][joined[:, channel]] for channel in range(3)], axis=1)
            assert np.abs(values.reshape(len(joined), -1) - theirs[key].numpy()).max() == 0.0


@pytest.fixture(scope="module")
def front(tiny_checkpoint):
    """Both sides' host path over the tiny checkpoint."""
    from concurrent.futures import ThreadPoolExecutor

    import jax

    from mmjax.config import MultimodalConfig
    from mmjax.frontend import Frontend
    from mmjax.loading import open_model

    checkpoint = tiny_checkpoint("qwen3_vl")
    with ThreadPoolExecutor(1) as media:
        model = open_model(checkpoint.path, dtype="float32", device=jax.devices()[0])
        yield Front(checkpoint, Frontend(model, MultimodalConfig(), media))


@dataclass(frozen=True)
class Front:
    """Calling it prepares a message on both sides. `model` is transformers'; `processor` ours."""

    checkpoint: object
    frontend: object

    @property
    def model(self):
        return self.checkpoint.model

    @property
    def processor(self) -> Qwen3VLProcessor:
        return self.frontend.model.processor

    def ours(self, parts, tail="", **options):
        """Our prompt of a message; options go to the processor."""
        from mmjax.frontend import InputOptions

        content = []
        for index, (words, (kind, *shape)) in enumerate(parts):
            content.append({"type": "text", "text": words})
            pixels = noise(index, *shape[: 2 + (kind == "video")], 3)
            value = (pixels, {"fps": shape[3]}) if kind == "video" else pixels
            content.append({"type": kind, kind: value})
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": tail}]}]
        return self.frontend.chat(messages, InputOptions(mm_processor_kwargs=options), limit=None)

    def __call__(self, parts, tail=""):
        content, media, metadata = [], {"image": [], "video": []}, []
        for index, (words, (kind, *shape)) in enumerate(parts):
            content += [{"type": "text", "text": words}, {"type": kind}]
            media[kind].append(noise(index, *shape[: 2 + (kind == "video")], 3))
            if kind == "video":
                frames = list(range(shape[0]))
                metadata.append({"total_num_frames": shape[0], "fps": shape[3], "frames_indices": frames})
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": tail}]}]
        processor = self.checkpoint.processor
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        given = {"images": media["image"]} if media["image"] else {}
        if metadata:
            given |= {"videos": media["video"], "video_metadata": metadata}
        return self.ours(parts, tail), processor(text=[text], return_tensors="pt", **given)


PAIR = [("see ", ("video", 5, 64, 96, 2.0)), (" and ", ("image", 64, 64)), (" and ", ("video", 2, 64, 64, 1.0))]


def test_the_templates_pair_of_vision_tokens_may_go(front):
    """Without nesting the ids are the same but for the outer pair of each clip; pictures keep theirs."""
    processor, tokenizer = front.processor, front.frontend.model.tokenizer
    nested, flat = front.ours(PAIR), front.ours(PAIR, nested_vision_tokens=False)
    start, end = processor.clip_text.start_id, processor.clip_text.end_id
    text = tokenizer.decode(nested.token_ids)
    pads = "<|video_pad|>" * 6
    steps = "".join(f"<{t} seconds><|vision_start|>{pads}<|vision_end|>" for t in ("0.2", "1.2", "2.0"))
    assert f"see <|vision_start|>{steps}<|vision_end|> and <|vision_start|><|image_pad|>" in text
    expected = text.replace(f"<|vision_start|>{steps}<|vision_end|>", steps)
    last = f"<0.5 seconds><|vision_start|>{'<|video_pad|>' * 4}<|vision_end|>"
    assert f" and <|vision_start|>{last}<|vision_end|>" in expected
    expected = expected.replace(f"<|vision_start|>{last}<|vision_end|>", last)
    assert tokenizer.decode(flat.token_ids) == expected
    assert len(flat.token_ids) == len(nested.token_ids) - 4
    count = {token: (nested.token_ids == token).sum() - (flat.token_ids == token).sum() for token in (start, end)}
    assert count == {start: 2, end: 2}
    # What the model is shown is the same, and the step after each time still counts as a picture of its own.
    assert [item.plan.grid for item in flat.items] == [item.plan.grid for item in nested.items]
    assert flat.positions.max() == nested.positions.max() - 4
    assert [item.runs for item in flat.items] == [
        [(position - shift, length) for position, length in item.runs]
        for item, shift in zip(nested.items, (1, 2, 3), strict=True)
    ]


def test_a_choice_of_nesting_leaves_the_pictures_key_alone(front):
    (image,) = (item for item in front.ours(PAIR).items if item.modality is Modality.IMAGE)
    (other,) = (item for item in front.ours(PAIR, nested_vision_tokens=False).items if item.modality is Modality.IMAGE)
    assert image.cache_key == other.cache_key


def test_times_are_part_of_a_prompts_identity(front):
    """The same frames at another rate fill the same positions, under other text and another digest."""
    slow = front.ours([("see ", ("video", 4, 64, 64, 2.0))])
    fast = front.ours([("see ", ("video", 4, 64, 64, 4.0))])
    again = front.ours([("see ", ("video", 4, 64, 64, 2.0))])
    assert np.array_equal(slow.items[0].patches, fast.items[0].patches)
    assert slow.items[0].runs == fast.items[0].runs
    assert slow.items[0].cache_key != fast.items[0].cache_key
    assert slow.block_keys(8) == again.block_keys(8) != fast.block_keys(8)
    assert slow.token_ids.tolist() != fast.token_ids.tolist()


def test_usage_counts_rows_and_leaves_times_to_the_text(front):
    prompt = front.ours(PAIR)
    assert (prompt.usage.video_tokens, prompt.usage.image_tokens) == (3 * 6 + 4, 4)
    assert prompt.usage.prompt_tokens == len(prompt.token_ids)
    assert [len(item.runs) for item in prompt.items] == [3, 1, 1]


# ---- refusals and settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "size", "options", "message"),
    [
        (clip(4, 10.0), (64, 64), {"num_frames": 5}, "asked for 5 frames of a clip that has 4"),
        (clip(4, 10.0), (33, 6700), {}, "aspect ratio 203"),
        (clip(9, 10.0), (64, 64), {"do_sample_frames": False, "max_frames": 8}, "9 frames, more than max_frames=8"),
        (clip(4, 10.0), (64, 64), {"nested_vision_tokens": 1}, "nested_vision_tokens must be true or false, got 1"),
        (clip(4, 10.0), (64, 64), {"colour": 1}, "unknown processor option colour"),
        (clip(4, 10.0), (64, 64), {"videos_kwargs": [1]}, r"videos_kwargs must be a mapping of options, got \[1\]"),
        (clip(4, 10.0), (64, 64), {"max_pixels": 5 * BLOCK}, "min_pixels=6144 exceeds max_pixels=5120"),
    ],
    ids=str,
)
def test_unusable_clips_are_the_callers_fault(ours, metadata, size, options, message):
    with pytest.raises(RequestError, match=message):
        ours.plan_video(metadata, *size, options)


def test_options_resolve_once_and_for_all(ours):
    flat = {"nested_vision_tokens": False, "videos_kwargs": {"fps": 1}}
    assert ours.resolve(Modality.VIDEO, flat) == ours.resolve(Modality.VIDEO, flat | {"videos_kwargs": None, "fps": 1})
    assert ours.resolve(Modality.VIDEO, {"fps": 1, "videos_kwargs": {"fps": 3}})["fps"] == 3
    for options in ({}, {"fps": 1}, {"num_frames": 8}, {"videos_kwargs": {"nested_vision_tokens": False}}):
        once = ours.resolve(Modality.VIDEO, options)
        assert ours.resolve(Modality.VIDEO, once) == once
        assert once["nested_vision_tokens"] is not bool(options.get("videos_kwargs"))
    assert ours.resolve(Modality.VIDEO, {})["fps"] == 2
    assert "nested_vision_tokens" not in ours.resolve(Modality.IMAGE, {"nested_vision_tokens": False})


def test_class_defaults_and_published_files(tmp_path):
    """Without files the limits are the classes'; published checkpoints name larger ones, and 0.5 for both."""
    published = {
        "preprocessor_config": {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": HALF,
            "image_std": HALF,
        },
        "video_preprocessor_config": {
            "size": {"longest_edge": 25165824, "shortest_edge": 4096},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": HALF,
            "image_std": HALF,
        },
    }
    ours = processor(tmp_path, **published)
    defaults = transformers.Qwen3VLVideoProcessor()
    assert (ours.image_settings.min_pixels, ours.image_settings.max_pixels) == (65536, 16777216)
    assert (ours.video_settings.min_pixels, ours.video_settings.max_pixels) == (4096, 25165824)
    for name in ("do_sample_frames", "fps", "min_frames", "max_frames", "max_video_tokens"):
        assert getattr(ours.video_settings, name) == getattr(defaults, name)
    # The largest clip has five frames: they count as four and take three temporal steps.
    assert ours.max_tokens_per_item() == {Modality.IMAGE: 65536, Modality.VIDEO: 3 * (25165824 // 4 // BLOCK) * 4}
    assert ours.worst_contexts(65536) == 384
    (tmp_path / "video_preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {}}))
    bare = Qwen3VLProcessor.from_checkpoint(CONFIG, tmp_path).video_settings
    assert {"shortest_edge": bare.min_pixels, "longest_edge": bare.max_pixels} == dict(defaults.size)
    assert bare.normalisation.mean == tuple(defaults.image_mean)
    assert bare.normalisation.std == tuple(defaults.image_std)


def test_a_number_of_frames_in_the_file_puts_the_class_rate_aside(tmp_path):
    for rate in ({}, {"fps": None}):
        own = processor(
            tmp_path, preprocessor_config=PICTURES, video_preprocessor_config={"num_frames": 8, **rate, **CLIPS}
        )
        assert (own.video_settings.num_frames, own.video_settings.fps) == (8, None)
        assert len(own.sample_frames(clip(30, 10.0), {})) == 8


def test_a_clip_needs_a_tokenizer(tmp_path):
    ours = processor(tmp_path, preprocessor_config=PICTURES, video_preprocessor_config=CLIPS)
    assert ours.plan_image(64, 64, {}).rows == 4
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the times of clips need a tokenizer"):
        ours.plan_video(clip(4, 2.0), 64, 64, {})
