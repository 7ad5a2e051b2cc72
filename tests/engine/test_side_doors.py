# SPDX-License-Identifier: Apache-2.0
"""Claim: rows, token ids, options, limits and engines of one half get the same answers, or a refusal by name."""

from __future__ import annotations

from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from llm_kit import GREEDY, assert_nothing_held, clip, noise, user

import mmjax
from mmjax.errors import ConfigError, EngineError, PlaceholderError, PromptTooLongError, RequestError

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
PICTURE = noise(84, 140, 1)  # 3 x 5 rows
GOOD = user(PICTURE, "what?")


def cold(llm) -> None:
    """Nothing is known of earlier requests."""
    llm.invalidate_caches()


# Embedding rows.

FORMS = {
    "bare": lambda rows: rows,
    "in a list": lambda rows: [rows],
    "in a tuple": lambda rows: (rows,),
    "float64": lambda rows: [rows.astype(np.float64)],
    "of jax": lambda rows: [jax.numpy.asarray(rows)],
    "not contiguous": lambda rows: [np.asfortranarray(rows)],
}


def test_the_encoders_own_rows_give_the_same_answer(llm):
    expected = llm.chat(GOOD, GREEDY).token_ids
    (rows,) = llm.encode([PICTURE])
    for name, form in FORMS.items():
        cold(llm)
        out = llm.chat(GOOD, GREEDY, multi_modal_embeddings={"image": form(rows)})
        assert out.token_ids == expected, name
        assert (out.metrics.items_encoded, out.metrics.items_cached) == (0, 0)
    low = llm.chat(GOOD, GREEDY, multi_modal_embeddings={"image": [rows.astype(ml_dtypes.bfloat16)]})
    assert low.error is None
    other = llm.chat(GOOD, GREEDY, multi_modal_embeddings={"image": [rows[::-1]]})
    assert other.token_ids != expected, "equal pixels, other rows: nothing of the picture's own may serve"
    assert [out.metrics.prefix_tokens_reused for out in (low, other)] == [0, 0]


def test_some_rows_are_supplied_and_others_encoded(llm):
    messages = user(PICTURE, "and", noise(56, 84, 2), "?")
    expected = llm.chat(messages, GREEDY).token_ids
    (rows,) = llm.encode([PICTURE])
    cold(llm)
    out = llm.chat(messages, GREEDY, multi_modal_embeddings={"image": [rows, None]})
    assert (out.token_ids, out.metrics.items_encoded) == (expected, 1)


BAD_ROWS = {
    "one column short": np.zeros((15, 63), np.float32),
    "one row short": np.zeros((14, 64), np.float32),
    "rank 3": np.zeros((1, 15, 64), np.float32),
    "rank 4": np.zeros((1, 1, 15, 64), np.float32),
    "rank 1": np.zeros(15 * 64, np.float32),
    "integers": np.zeros((15, 64), np.int32),
    "nan": np.full((15, 64), np.nan, np.float32),
    "infinite": np.full((15, 64), np.inf, np.float32),
    "no rows": np.zeros((0, 64), np.float32),
    "rows of another grid": np.zeros((12, 64), np.float32),
    "ragged": [[0.0] * 64, [0.0]],
    "a pickle": b"\x80\x04N.",
}


def test_rows_that_do_not_fit_fail_alone_and_compile_nothing(llm):
    (rows,) = llm.encode([PICTURE])
    compiled, expected = llm.stats().compiles["since"], llm.chat(GOOD, GREEDY).token_ids
    given = [{"image": [value]} for bad in BAD_ROWS.values() for value in (rows, bad)]
    outs = llm.chat([GOOD] * len(given), GREEDY, multi_modal_embeddings=given)
    assert [out.token_ids for out in outs[::2]] == [expected] * len(BAD_ROWS)
    for name, out in zip(BAD_ROWS, outs[1::2], strict=True):
        assert type(out.error) is RequestError, name
        assert (out.error.item, out.finish_reason) == (0, "error")
        shape = np.shape(BAD_ROWS[name]) if isinstance(BAD_ROWS[name], np.ndarray) else None
        if shape and shape != (15, 64):
            assert "[15, 64]" in str(out.error)
            assert str(list(shape)) in str(out.error)
    assert llm.stats().compiles["since"] == compiled
    assert_nothing_held(llm)


# Token ids.


@pytest.mark.parametrize(
    "media",
    [
        {"image": [PICTURE]},
        {"image": [PICTURE, noise(56, 84, 2)]},
        {"video": [(clip(5, 56, 84), {"fps": 3.0})], "image": [PICTURE]},
        {"image": [noise(56, 56, 3)], "video": [(clip(2, 56, 56), {"fps": 3.0})]},
    ],
    ids=["image", "two images", "clip and image", "image and clip"],
)
def test_compact_and_expanded_ids_are_one_prompt(llm, media):
    text = "see " + "".join(f"{VIDEO if name == 'video' else IMAGE} then " for name in media for _ in media[name])
    whole = llm.generate(text, GREEDY, media)
    compact = llm.model.tokenizer.encode(text)
    for ids in (compact, np.asarray(compact), whole.prompt_token_ids):
        cold(llm)
        out = llm.generate(ids, GREEDY, media)
        assert out.prompt_token_ids == whole.prompt_token_ids
        assert (out.token_ids, out.usage) == (whole.token_ids, whole.usage)
    assert len(whole.prompt_token_ids) > len(compact)
    for cut in (1, 2):  # neither form: one placeholder of the expanded prompt is missing, or one too many
        pad = whole.prompt_token_ids.index(llm.model.processor.placeholder_id[next(iter(media))])
        broken = [*whole.prompt_token_ids[:pad], *whole.prompt_token_ids[pad + cut :]]
        with pytest.raises(PlaceholderError):
            llm.generate(broken, GREEDY, media)


# Options of one request.


def test_options_of_a_request_change_its_rows_and_nobody_elses(llm):
    """196 x 196: 49 rows; max_pixels=9800 gives 84 x 84, 9 rows. The third and fourth request are the first again."""
    picture = noise(196, 196)
    ways = [{}, {"max_pixels": 9800}, {}, {"min_pixels": 3136, "max_pixels": 50176}]
    encoded = [llm.encode([picture], mm_processor_kwargs=way)[0] for way in ways]
    assert [len(rows) for rows in encoded] == [49, 9, 49, 49]
    assert llm.stats().items["items_encoded"] == 2
    np.testing.assert_array_equal(encoded[2], encoded[0])
    np.testing.assert_array_equal(encoded[3], encoded[0])

    cold(llm)
    before = llm.stats().items["items_encoded"]
    outs = [llm.chat(user(picture, "?"), GREEDY, mm_processor_kwargs=way) for way in ways]
    assert [out.usage.image_tokens for out in outs] == [49, 9, 49, 49]
    assert outs[0].token_ids == outs[2].token_ids == outs[3].token_ids
    assert llm.stats().items["items_encoded"] == before + 2
    assert outs[1].metrics.prefix_tokens_reused == 0


def test_an_items_own_options_come_before_the_requests(llm):
    parts = [
        {"type": "image", "image": noise(196, 196), "max_pixels": 9800},
        {"type": "image", "image": noise(196, 196)},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": parts}]
    assert llm.count_tokens(messages).image_tokens == 9 + 49
    assert llm.count_tokens(messages, mm_processor_kwargs={"max_pixels": 19600}).image_tokens == 9 + 25
    assert llm.chat(messages, GREEDY, mm_processor_kwargs={"max_pixels": 19600}).usage.image_tokens == 9 + 25


def test_the_background_of_a_transparent_picture_is_part_of_its_name(llm, monkeypatch):
    rgba = np.dstack([noise(84, 140), np.zeros((84, 140), np.uint8)])
    counts = []
    for colour in ((255, 255, 255), (0, 0, 0), (255, 255, 255)):
        monkeypatch.setattr(llm.frontend, "_options", replace(llm.frontend._options, image_background=colour))
        llm.encode([rgba])
        counts.append(llm.stats().items["items_encoded"])
    assert counts == [1, 2, 2]


def test_names_and_tenants_share_no_rows(llm):
    ways = [{}, {"multi_modal_uuids": {"image": "a"}}, {"multi_modal_uuids": {"image": ["b"]}}, {"cache_salt": "t"}]
    for count, way in enumerate(ways, 1):
        for _ in range(2):
            llm.encode([PICTURE], **way)
        assert llm.stats().items["items_encoded"] == count
    for wrong, message in (([3], "must be strings or None"), (["a", "b"], "2 names for 1 image")):
        with pytest.raises(RequestError, match=message):
            llm.encode([PICTURE], multi_modal_uuids={"image": wrong})


def test_the_limit_of_items_is_one_of_prompts(llm, monkeypatch):
    monkeypatch.setattr(llm.frontend, "config", replace(llm.multimodal, limit_mm_per_prompt={"image": 1}))
    pictures = [noise(56, 56, seed) for seed in range(3)]
    for call in (
        lambda: llm.chat(user(*pictures, "?"), GREEDY),
        lambda: llm.generate(IMAGE * 3, GREEDY, {"image": pictures}),
        lambda: llm.count_tokens(user(*pictures)),
    ):
        with pytest.raises(RequestError, match="3 image items; limit_mm_per_prompt allows 1"):
            call()
    assert len(llm.encode(pictures)) == 3
    assert llm.chat(user(pictures[0], clip(2, 56, 56)), GREEDY).error is None


# Truncation.


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_no_limit_cuts_a_picture(llm, monkeypatch, side):
    """10 text, a picture of 6 rows, 14 text: every limit from 1 to 30."""
    ids = [*range(10), llm.model.tokenizer.convert_tokens_to_ids("<|image_pad|>"), *range(20, 34)]
    data, one = {"image": [noise(56, 84)]}, mmjax.SamplingParams(max_tokens=1, temperature=0.0)
    pad = ids[10]
    for limit in range(1, 31):
        monkeypatch.setattr(llm.running, "max_seq_len", limit + 1)
        if side is None and limit < 30:
            with pytest.raises(PromptTooLongError, match=f"needs 30 tokens, the limit is {limit}"):
                llm.generate(ids, one, data)
            continue
        out = llm.generate(ids, one, data, truncate=side)
        kept = len(out.prompt_token_ids)
        assert kept <= limit
        assert out.prompt_token_ids.count(pad) == out.usage.image_tokens
        whole = limit == 30 or limit >= (16 if side == "right" else 20)
        assert out.usage.image_tokens == (6 if whole else 0)
        assert any("dropped image 0" in warning for warning in out.warnings) == (not whole)
    assert_nothing_held(llm)


# New weights.


def test_caches_are_forgotten_on_request(llm):
    llm.chat(GOOD, GREEDY)
    assert llm.chat(GOOD, GREEDY).metrics.prefix_tokens_reused > 0
    assert len(llm.encode([PICTURE])) == llm.stats().items["items_encoded"] == 1
    cold(llm)
    assert (llm.stats().items["cache"]["items"], llm.stats().pages["cached"]) == (0, 0)
    out = llm.chat(GOOD, GREEDY)
    assert (out.metrics.prefix_tokens_reused, out.metrics.items_encoded) == (0, 1)


def test_new_weights_answer_as_if_they_had_always_been_there(llm):
    machine = llm.running.machine
    old = {"vision": machine.encoder.params, "text": machine.text.params}
    new = jax.tree.map(lambda x: -x if x.ndim > 1 else x, old)
    compiled = machine.counter.count  # the line above compiled
    before, rows = llm.chat(GOOD, GREEDY), llm.encode([PICTURE])[0]
    try:
        llm.replace_weights(new)
        after = llm.chat(GOOD, GREEDY)
        assert after.token_ids != before.token_ids
        assert (after.metrics.prefix_tokens_reused, after.metrics.items_encoded) == (0, 1)
        assert not np.allclose(llm.encode([PICTURE])[0], rows)
    finally:
        llm.replace_weights(old)
    again = llm.chat(GOOD, GREEDY)
    assert (again.token_ids, again.metrics.items_encoded) == (before.token_ids, 1)
    np.testing.assert_array_equal(llm.encode([PICTURE])[0], rows)
    assert machine.counter.count == compiled


def test_other_trees_are_refused_and_the_old_weights_stay(llm):
    machine = llm.running.machine
    old = {"vision": machine.encoder.params, "text": machine.text.params}
    expected = llm.chat(GOOD, GREEDY).token_ids
    wrong = [
        ({"vision": old["vision"]}, "text.*embed.*got none"),
        ({**old, "text": {**old["text"], "extra": np.zeros(3, np.float32)}}, "extra.*expected none"),
        ({**old, "text": {**old["text"], "norm": np.zeros(63, np.float32)}}, r"norm.*\[64\].*\[63\]"),
        ({**old, "text": {**old["text"], "norm": np.zeros(64, np.float16)}}, "norm.*float32.*float16"),
    ]
    for params, message in wrong:
        with pytest.raises(ConfigError, match=message):
            llm.replace_weights(params)
    assert machine.text.params is old["text"]
    cold(llm)
    assert llm.chat(GOOD, GREEDY).token_ids == expected


def test_nothing_is_forgotten_while_requests_are_under_way(llm):
    stream = llm.stream(GOOD, mmjax.SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    next(stream)
    for call in (llm.invalidate_caches, lambda: llm.replace_weights({})):
        with pytest.raises(EngineError, match="1 requests are under way"):
            call()
    stream.close()
    llm.chat(GOOD, GREEDY)
    cold(llm)


def test_a_closed_engine_and_the_judge(tiny_reference):
    judge = tiny_reference()
    judge.invalidate_caches()
    with pytest.raises(EngineError, match="reference"):
        judge.replace_weights({})
