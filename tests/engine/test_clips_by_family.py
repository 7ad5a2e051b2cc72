# SPDX-License-Identifier: Apache-2.0
"""Claim: families take clips alike, whatever those are made of, and sample them as their processors do."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import permutations

import numpy as np
import pytest
import tolerances
from llm_kit import CHECKPOINT, assert_nothing_held, clip, noise, serving, user
from PIL import Image
from test_chunks_and_caches import PARAMS, same
from test_media_video import animation, grey_frames, video_file

import mmjax
from mmjax.compilation import CompileCounter
from mmjax.config import PrefillBucket
from mmjax.errors import MediaError, RequestError
from mmjax.frontend import InputOptions
from mmjax.inputs.content_parts import MediaPart
from mmjax.inputs.items import Modality, VideoMetadata
from mmjax.inputs.prompt import PromptItem
from mmjax.media import ClipSource, MediaOptions
from mmjax.models.catalogue import parity_records
from mmjax.models.steps import embed_tokens

FAMILIES = [name for name, record in parity_records().items() if Modality.VIDEO in record["facts"]["modalities"]]
ONE = mmjax.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

pytestmark = [pytest.mark.parametrize("family", FAMILIES), pytest.mark.timeout(300)]


def film(value: object, *more: object) -> list[dict]:
    """A message about one clip, and whatever else `user` takes."""
    (message,) = user("see ", *more, "what?")
    part = {"type": "video", "video": value}
    return [message | {"content": [message["content"][0], part, *message["content"][1:]]}]


def prompt_of(llm: mmjax.LLM, value: object, **options: object):
    return llm.frontend.chat(film(value), InputOptions(mm_processor_kwargs=options), limit=None)


def item_of(llm: mmjax.LLM, value: object, **options: object) -> PromptItem:
    (item,) = prompt_of(llm, value, **options).items
    return item


# ---- what clips are made of -----------------------------------------------------------------------------------------


def test_frames_are_one_clip_however_they_come(tiny_reference, tmp_path, family):
    llm, frames, meta = tiny_reference(family), grey_frames(5, 64, 96), {"fps": 25.0}
    path = tmp_path / "clip.webp"
    path.write_bytes(animation("WEBP", frames))
    pictures = [frames[0], Image.fromarray(frames[1]), *frames[2:]]
    first, *others = [
        prompt_of(llm, value)
        for value in ((frames, meta), (list(frames), meta), (pictures, meta), animation("GIF", frames), path)
    ]
    for other in others:
        assert other.token_ids.tolist() == first.token_ids.tolist()
        assert other.items[0].cache_key == first.items[0].cache_key
        np.testing.assert_array_equal(other.items[0].patches, first.items[0].patches)


@pytest.mark.parametrize("options", [{"fps": 5}, {"num_frames": 4}], ids=str)
def test_of_a_file_the_frames_that_count_are_decoded(tiny_reference, family, options):
    llm, file = tiny_reference(family), video_file(grey_frames(12, 64, 96))
    whole = ClipSource.open(file, MediaOptions()).decode()
    kept = llm.model.processor.sample_frames(whole.metadata, options)
    assert len(kept) == {"fps": 6, "num_frames": 4}[next(iter(options))]
    chosen = {"fps": 10.0, "total_num_frames": 12, "frames_indices": kept}
    known = item_of(llm, (whole.frames[list(kept)], chosen), **options)
    for value in (file, (whole.frames, {"fps": 10.0})):
        item = item_of(llm, value, **options)
        np.testing.assert_array_equal(item.patches, known.patches)
        assert item.plan.seconds_per_step == known.plan.seconds_per_step
        assert item.plan.span_ids.tolist() == known.plan.span_ids.tolist()
    assert item_of(llm, file, **options).cache_key == known.cache_key


def test_a_file_and_an_animation_are_answered(tiny_llm, family):
    frames = grey_frames(4, 64, 64)
    with serving(tiny_llm(family)) as llm:
        out = llm.chat(film((frames, {"fps": 25.0})), ONE)
        again = llm.chat(film(animation("WEBP", frames)), ONE)
        assert (again.token_ids, again.metrics.items_encoded) == (out.token_ids, 0)
        assert llm.chat(film(video_file(frames)), ONE).usage.video_tokens == out.usage.video_tokens > 0
        assert_nothing_held(llm)


# ---- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "fps", "options"),
    [
        (12, 10.0, {"fps": 5}),
        (12, 10.0, {"num_frames": 4}),
        (11, 29.97, {"fps": 3.5}),
        (6, 24.0, {}),
        (5, 3.0, {"do_sample_frames": False}),
        (4, None, {}),
    ],
    ids=str,
)
def test_prompts_and_pixels_are_those_of_transformers(tiny_checkpoint, tiny_reference, family, frames, fps, options):
    llm, checkpoint = tiny_reference(family), tiny_checkpoint(family, **CHECKPOINT)
    pixels = clip(frames, 56, 84, frames)
    shown = [{"type": "text", "text": "see "}, {"type": "video"}, {"type": "text", "text": "what?"}]
    text = checkpoint.processor.apply_chat_template(
        [{"role": "user", "content": shown}], tokenize=False, add_generation_prompt=True
    )
    metadata = {"total_num_frames": frames, "fps": fps, "frames_indices": list(range(frames))}
    asked = {"do_sample_frames": True} if options else {}
    asked |= {"fps": None} if "num_frames" in options else {}  # the other rule may be the checkpoint's own
    theirs = checkpoint.processor(
        text=[text], videos=[pixels], video_metadata=[metadata], return_tensors="np", **asked | options
    )
    prompt = prompt_of(llm, (pixels, {"fps": fps}), **options)
    assert prompt.token_ids.tolist() == theirs["input_ids"][0].tolist()
    (item,) = prompt.items
    assert item.plan.grid == tuple(theirs["video_grid_thw"][0])
    bytes_ = item.patches.reshape(len(item.patches), 3, -1)
    values = llm.model.processor.pixel_table()[np.arange(3)[:, None], bytes_]
    assert np.abs(values.reshape(len(bytes_), -1) - theirs["pixel_values_videos"]).max() == 0.0


@pytest.mark.parametrize("frames", range(1, 6))
def test_an_odd_last_frame_fills_its_step(tiny_reference, family, frames):
    """A single frame too, which transformers' samplers can't do."""
    item = item_of(tiny_reference(family), (clip(frames, 64, 64), {"fps": 2.0}), do_sample_frames=False)
    steps = (frames + 1) // 2
    assert item.plan.grid[0] == len(item.plan.contexts) == steps
    first, second = np.moveaxis(item.patches.reshape(steps, item.plan.contexts[0], 3, 2, -1)[-1], 2, 0)
    assert np.array_equal(first, second) == bool(frames % 2)


# ---- metadata -------------------------------------------------------------------------------------------------------


def test_clips_that_are_none_fail_alone(tiny_llm, family):
    bad = {
        "fps must be a positive number of frames a second, got 0": (clip(3, 56, 56), {"fps": 0}),
        "got nan": (clip(3, 56, 56), {"fps": float("nan")}),
        "got -1": (clip(3, 56, 56), {"fps": -1}),
        "frames_indices names 0 frames": (clip(3, 56, 56), {"frames_indices": []}),
        "a video of 0 frames": clip(0, 56, 56),
        "the video can't be decoded" if find_spec("av") else "video files need PyAV": b"<html></html>",
    }
    with serving(tiny_llm(family)) as llm:
        good = film((clip(4, 56, 56), {"fps": None}))
        *outs, neighbour = llm.chat([*[film(value, noise(56, 56)) for value in bad.values()], good], ONE)
        for out, message in zip(outs, bad, strict=True):
            assert isinstance(out.error, MediaError)
            assert out.error.item == 0
            assert message in str(out.error)
        assert any("24 frames a second are assumed" in warning for warning in neighbour.warnings)
        assert neighbour.token_ids == llm.chat(good, ONE).token_ids
        assert_nothing_held(llm)


def test_frames_that_are_there_win_over_claims(tiny_reference, family):
    """Of a file that ends within its fifth frame, of seven; and of an array that is said to hold a hundred."""
    llm, frames = tiny_reference(family), clip(7, 64, 64)
    data = animation("PNG", frames)
    cut = data[: int(len(data) * 4.5 / 7)]
    for options in ({}, {"fps": 20}):
        expected = prompt_of(llm, (frames[:4], {"fps": 25.0}), **options)
        for value in (cut, (frames[:4], {"fps": 25.0, "total_num_frames": 100})):
            prompt = prompt_of(llm, value, **options)
            assert prompt.token_ids.tolist() == expected.token_ids.tolist()  # times of steps included
            assert any(word in " ".join(prompt.items[0].plan.warnings) for word in ("claims 7", "claims 100"))
            np.testing.assert_array_equal(prompt.items[0].patches, expected.items[0].patches)


def test_a_clip_is_named_by_its_frames_and_when_they_are_seen(tiny_reference, family):
    llm, frames = tiny_reference(family), clip(4, 64, 64)
    variants = [
        {"fps": 2.0},
        {"fps": 4.0},
        {"fps": 2.0, "total_num_frames": 8, "frames_indices": (0, 2, 4, 6)},
        {"fps": 2.0, "total_num_frames": 8, "frames_indices": (1, 3, 5, 7)},
        {"fps": 2.0, "total_num_frames": 9, "frames_indices": (0, 2, 4, 6)},  # a longer source
        {"fps": 4.0, "total_num_frames": 8, "frames_indices": (0, 2, 4, 6)},
    ]
    keys = [item_of(llm, (frames, meta)).cache_key for meta in variants]
    assert len(set(keys)) == len(variants)
    assert [item_of(llm, (frames.copy(), VideoMetadata(4, 2.0, (0, 1, 2, 3)))).cache_key] == keys[:1]
    assert item_of(llm, (frames[::-1], variants[0])).cache_key not in keys


# ---- in the prompt --------------------------------------------------------------------------------------------------


def test_pictures_and_clips_in_any_order(tiny_llm, family, monkeypatch):
    """The step's input at each position, deepstack levels included, is the row of the item that stands there."""
    media = {"picture": noise(64, 96, 1), "clip": (clip(4, 64, 64, 2), {"fps": 2.0}), "short": (clip(2, 64, 96, 3), {})}
    seen = []
    with serving(tiny_llm(family)) as llm:
        kinds = {name: Modality.IMAGE if name == "picture" else Modality.VIDEO for name in media}
        encoded = llm.encode([MediaPart(kinds[name], value) for name, value in media.items()])
        rows, runner = dict(zip(media, encoded, strict=True)), llm.running.machine.text

        def prefill(chunks, row_slots, original=runner.prefill):
            bucket = PrefillBucket(sum(map(len, chunks)), len(chunks))
            inputs, _ = runner._prefill_inputs(chunks, bucket, row_slots, any_prefix=True)
            arguments = (runner.family, runner.cfg, runner.params, runner._pool())
            hidden, deepstack, _ = embed_tokens(*arguments, inputs.token_ids, inputs.row_index)
            levels = [] if deepstack is None else list(deepstack)
            seen.append(np.concatenate([hidden, *levels], axis=-1))
            return original(chunks, row_slots)

        monkeypatch.setattr(runner, "prefill", prefill)
        for order in permutations(media):
            parts = [part for name in order for part in (f"{name}: ", media[name])]
            llm.running.call(llm.running.pages.clear)
            seen.clear()
            prompt = llm.frontend.chat(user(*parts, "?"), InputOptions(), limit=None)
            llm.chat(user(*parts, "?"), mmjax.SamplingParams(max_tokens=1))
            inputs = np.concatenate(seen)
            for name, item in zip(order, prompt.items, strict=True):
                np.testing.assert_array_equal(inputs[item.row_positions], rows[name])
            assert (inputs[~prompt.embed_mask, llm.model.cfg.hidden_size :] == 0).all()


def test_long_clips_stream_through_a_small_pool(tiny_llm, family):
    """Three clips through rows for one and a half; then each of them through rows for two of its three steps."""
    clips = [(clip(6, 64, 96, i), {"fps": 2.0}) for i in range(3)]
    messages = user("first ", clips[0], "then ", noise(40, 40), clips[1], "and ", clips[2], "what?")
    with serving(tiny_llm(family)) as llm:
        cold = llm.chat(messages, PARAMS)
        rows = llm.explain(messages).spans[0].rows
        encoded = llm.encode([MediaPart(Modality.VIDEO, clips[0])])[0]
    for capacity, parts in ((rows * 3 // 2, 4), (rows * 2 // 3 + 1, 7)):
        small = {"capacity_rows": capacity, "reuse_bytes": 0}
        with serving(tiny_llm(family), budgets=small, chunk_tokens=24, trace=300) as llm:
            out = llm.chat(messages, PARAMS)
            same(out, cold)
            assert (out.usage, out.metrics.items_encoded) == (cold.usage, parts)
            assert max(row.rows_in_use for row in llm.running.engine.trace.rows) <= capacity
            (again,) = llm.encode([MediaPart(Modality.VIDEO, clips[0])])
            np.testing.assert_allclose(again, encoded, rtol=0, atol=tolerances.OTHER_LAYOUT)
            assert_nothing_held(llm)


def test_a_clip_with_more_tokens_than_the_encoder_takes_runs_in_parts(tiny_llm, family):
    messages = film((clip(6, 64, 96), {"fps": 2.0}))
    with serving(tiny_llm(family)) as llm:
        cold = llm.chat(messages, PARAMS)
        steps, height, width = llm.explain(messages).spans[0].grid
    assert steps == 3
    tokens = height * width
    with serving(tiny_llm(family), budgets={"max_num_tokens": tokens}) as llm:
        compiles = CompileCounter().start()
        out = llm.chat(messages, PARAMS)
        compiles.stop()
        same(out, cold)
        assert (out.metrics.items_encoded, compiles.count) == (3, 0)
        same(llm.chat(messages, PARAMS), cold)
        llm.running.call(llm.running.pages.clear)
        assert llm.chat(messages, PARAMS).metrics.items_cached == 3
    with serving(tiny_llm(family), budgets={"max_num_tokens": tokens - 1}) as llm:  # a step is never cut
        with pytest.raises(RequestError, match=rf"needs {3 * tokens} encoder tokens .* maximum {tokens - 1}"):
            llm.chat(messages, PARAMS)
        assert_nothing_held(llm)
