# SPDX-License-Identifier: Apache-2.0
"""Claim: engines of one half, other readiness rules, rows alone and statistics are all the same engine."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from llm_kit import CHECKPOINT, GREEDY, assert_nothing_held, build, clip, noise, png, serving, together, user

import mmjax
from mmjax.encoder.budgets import Readiness
from mmjax.inputs.content_parts import MediaPart
from mmjax.inputs.items import Modality
from mmjax.media.images import ImageSource

pytestmark = pytest.mark.timeout(300)

PICTURES = [noise(84, 140, 1), png(noise(150, 90, 2)), noise(28, 196, 3)]


@pytest.fixture(scope="module")
def path(tiny_checkpoint):
    return tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_rows_are_those_of_the_judge(tiny_llm, tiny_reference, family):
    items = [*PICTURES, MediaPart(Modality.VIDEO, clip(4, 56, 84, 4))]
    with serving(tiny_llm(family)) as llm:
        rows = llm.encode(items)
        again = llm.encode(items[::-1])[::-1]
        assert llm.stats().items["items_encoded"] == 4
        assert_nothing_held(llm)
    judged = tiny_reference(family).encode(items)
    assert [r.shape for r in rows] == [(15, 64), (15, 64), (7, 64), (12, 64)]
    for ours, same, theirs in zip(rows, again, judged, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, same)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerances.OTHER_LAYOUT)


def test_more_rows_than_the_pool_holds(tiny_llm):
    """Rows are given back as they are read."""
    pictures = [noise(200, 200, i) for i in range(9)]
    with serving(tiny_llm()) as llm:
        expected = llm.encode(pictures)
    with serving(tiny_llm(), budgets={"capacity_rows": 110, "reuse_bytes": 0}) as llm:
        rows = llm.encode(pictures)
        assert_nothing_held(llm)
    for ours, theirs in zip(rows, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerances.OTHER_LAYOUT)


def test_rows_and_answers_at_once(llm):
    alone = llm.chat(user(*PICTURES, "?"), GREEDY).token_ids
    with together(llm):
        handles = [llm.submit(user(*PICTURES, str(i)), GREEDY) for i in range(6)]
    rows = llm.encode([noise(84, 140, 50 + i) for i in range(8)])
    assert len(rows) == 8
    assert all(handle.result().finish_reason == "length" for handle in handles)
    assert llm.chat(user(*PICTURES, "?"), GREEDY).token_ids == alone


def test_an_engine_that_only_encodes(tiny_llm, path):
    with serving(tiny_llm()) as llm:
        expected = llm.encode(PICTURES)
    with build(path, multimodal=mmjax.MultimodalConfig(encoder_max_num_tokens=512, mm_encoder_only=True)) as llm:
        rows = llm.encode(PICTURES)
        assert llm.running.machine.text is None
        for call in (llm.chat, llm.submit, llm.stream):
            with pytest.raises(mmjax.EngineError, match="mm_encoder_only"):
                call(user("hi"))
        assert llm.stats().items["items_encoded"] == 3
        assert "steps" in str(llm.stats())
        film = MediaPart(Modality.VIDEO, (clip(4, 56, 84), {"fps": 2.0}))
        assert llm.encode([film])[0].shape == (12, 64)
        assert llm.count_tokens(user(PICTURES[0], "?")).image_tokens == len(rows[0])
        with pytest.raises(mmjax.RequestError, match="item 1"):
            llm.encode([PICTURES[0], b"no picture"])
        llm.invalidate_caches()
        np.testing.assert_array_equal(llm.encode(PICTURES[:1])[0], rows[0])
        assert llm.stats().items["items_encoded"] == 5
        assert_nothing_held(llm)
    for ours, theirs in zip(rows, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerances.OTHER_LAYOUT)


def test_encoder_sizes_and_resident_rows_as_asked(tiny_llm, path):
    """C below the rows of a full batch, reuse switched off: what does not fit at once passes through."""
    with serving(tiny_llm()) as llm:
        expected = llm.encode([noise(200, 200, i) for i in range(4)])
    config = mmjax.MultimodalConfig(
        encoder_max_num_tokens=512,
        encoder_output_max_bytes="30KiB",
        encoder_cache_max_bytes=0,
        encoder_buckets=[(512, 32), (256, 16)],
        mm_encoder_only=True,
    )
    with build(path, multimodal=config) as llm:
        stats, encoder = llm.stats(), llm.running.machine.encoder
        assert stats.budgets["output_bytes"] == encoder.pool.nbytes == 30 * 1024
        assert {(256, 16), (512, 32)} <= {tuple(bucket.key) for bucket in encoder.buckets}
        assert len(encoder.buckets) == 3  # and one for the worst item
        for ours, theirs in zip(llm.encode([noise(200, 200, i) for i in range(4)]), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerances.OTHER_LAYOUT)
        assert llm.stats().items["padding"]["runs"] > 1


def test_an_engine_without_a_tower(tiny_llm, path, monkeypatch):
    talk = user(noise(84, 140, 1), "what?")
    with serving(tiny_llm()) as llm:
        rows = llm.encode([noise(84, 140, 1)])
        expected = [llm.chat(messages, GREEDY).token_ids for messages in (user("hi"), talk)]
    config = mmjax.MultimodalConfig(
        encoder_max_num_tokens=512, encoder_cache_max_bytes="128KiB", disable_mm_encoder=True
    )
    with build(path, multimodal=config) as llm:
        assert llm.chat(user("hi"), GREEDY).token_ids == expected[0]
        with monkeypatch.context() as patched:
            patched.setattr(ImageSource, "decode", lambda _: pytest.fail("decoded for nobody"))
            for call in (lambda: llm.chat(talk, GREEDY), lambda: llm.encode([noise(84, 140)])):
                with pytest.raises(mmjax.RequestError, match="disable_mm_encoder") as caught:
                    call()
                assert caught.value.item == 0
        given = llm.chat(talk, GREEDY, multi_modal_embeddings={"image": rows})
        assert given.token_ids == expected[1]
        assert [name for name in llm.running.machine.encoder.executables() if name.startswith("encode")] == []


@pytest.mark.parametrize("policy", ["default", "eager", "disabled"])
def test_waiting_for_all_items_changes_no_answer(tiny_llm, policy):
    conversations = [user(noise(84, 140, i), "and", noise(200, 200, i % 2), "?") for i in range(5)]
    with serving(tiny_llm()) as llm:
        alone = [llm.chat(messages, GREEDY).token_ids for messages in conversations]
    limits = {"budgets": {"readiness": Readiness.REQUEST}, "multimodal": {"encoder_scheduling_policy": policy}}
    with serving(tiny_llm(), **limits, chunk_tokens=30) as llm:
        with together(llm):
            handles = [llm.submit(messages, GREEDY) for messages in conversations]
        assert [handle.result().token_ids for handle in handles] == alone
        assert_nothing_held(llm)


def test_statistics(llm):
    llm.chat([user(noise(84, 140, 1), "what is it?")] * 2, GREEDY)
    stats = llm.stats()
    assert stats.items["items_encoded"] == 1
    assert stats.items["cache"]["in_use_bytes"] == 0
    assert stats.items["cache"]["current_bytes"] == 15 * 64 * 4
    assert stats.pages["in_use"] == 0
    assert stats.pages["cached"] + stats.pages["free"] == stats.pages["num_blocks"] == 160
    assert stats.queues == {"running": 0, "waiting": 0, "embedding": 0, "preemptions": 0}
    assert stats.steps["count"] >= 12  # one prefill and 11 tokens; more where the second request came a step later
    assert 0 < stats.tokens["median_ms"] <= stats.tokens["p99_ms"]
    assert "between tokens" in str(stats)
    assert stats.budgets["max_num_tokens"] == 512
    machine = llm.running.machine
    assert stats.compiles["at_start"] == len(machine.encoder.buckets) + 2 + len(machine.text.executables())
    assert {"decode 4", "prefill 128", "sample 4", "sample 4 greedy", "remember"} <= machine.text.executables().keys()
    assert "1 encoded" in str(stats)
    assert stats._repr_html_().count("<tr>") > 20


def test_the_judge_keeps_no_statistics(tiny_reference):
    with pytest.raises(mmjax.EngineError, match="no statistics"):
        tiny_reference().stats()
