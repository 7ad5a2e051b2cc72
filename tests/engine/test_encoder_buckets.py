# SPDX-License-Identifier: Apache-2.0
"""Claim: every legal batch has a compiled bucket, the smallest that holds it, and little of it is padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.bucket_sizes import sizes_that_reach, sizes_up_to
from mmjax.encoder.buckets import BucketLadder, EncoderLoad, PaddingStats, build_ladder
from mmjax.encoder.budgets import resolve_budgets
from mmjax.errors import ConfigError
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey


def bucket(tokens, contexts, windows=0, rows=10_000):
    return EncoderBucket(EncoderGraphKey(tokens, contexts), windows, rows)


def ladder_of(*pairs):
    return BucketLadder([bucket(*pair) for pair in pairs])


def family(tokens=8192, largest=4096, windows=64, worst=lambda tokens: -(-tokens // 10), worst_contexts=None, **knobs):
    cfg = SimpleNamespace(dtype="float32", row_width=8, merge=4, window_capacity=windows)
    processor = SimpleNamespace(
        max_tokens_per_item=lambda: {"image": largest}, worst_windows=worst, worst_contexts=worst_contexts
    )
    budgets = resolve_budgets(processor, cfg, max_batch_size=64, max_num_tokens=tokens)
    return budgets, build_ladder(budgets, processor, cfg, **knobs)


@pytest.mark.parametrize(
    ("tokens", "contexts", "fits"), [(512, 1, 512), (300, 1, 512), (256, 1, 256), (2048, 1, None), (300, 2, None)]
)
def test_smallest_fit(tokens, contexts, fits):
    found = ladder_of((1024, 1), (256, 1), (512, 1)).fit(EncoderLoad(1, tokens, contexts, 0, 1))
    assert (found and found.key.total_tokens) == fits


def test_overflow_of_anything_goes_up_a_bucket():
    ladder = BucketLadder([bucket(256, 4, 8, 64), bucket(512, 8, 16, 128), bucket(512, 128, 90, 128)])
    sizes = [(b.key, b.window_rows) for b in ladder.buckets]
    assert ladder.fit(EncoderLoad(1, 100, 4, 8, 64)) == ladder.buckets[0]
    for load in [(1, 257, 1, 0, 1), (1, 100, 5, 0, 1), (1, 100, 1, 9, 1), (1, 100, 1, 0, 65)]:
        assert ladder.fit(EncoderLoad(*load)) == ladder.buckets[1], sizes
    assert ladder.fit(EncoderLoad(1, 100, 9, 0, 1)) == ladder.buckets[2]
    assert ladder.fit(EncoderLoad(1, 100, 1, 91, 1)) is None


def test_segment_boundaries_are_no_part_of_a_bucket():
    ladder = ladder_of((32, 4), (64, 8))
    loads = [EncoderLoad(len(cut), sum(cut), len(cut), 0, 5) for cut in ([4, 6, 8], [5, 5, 8], [18])]
    assert {ladder.fit(load) for load in loads} == {ladder.buckets[0]}


def test_bad_ladders():
    with pytest.raises(ConfigError, match="at least one"):
        BucketLadder([])
    with pytest.raises(ConfigError, match="contexts"):
        ladder_of((4, 5))
    with pytest.raises(ConfigError, match="empty"):
        family(buckets=[])


def test_sizes_are_powers_of_two_with_thirds_between_the_large_ones():
    assert sizes_that_reach(6000, 256) == (256, 512, 1024, 1408, 1728, 2048, 2752, 3456, 4096, 5504, 6848)
    assert sizes_that_reach(1, 256) == (256,)
    assert sizes_that_reach(40, 16) == (16, 32, 64)
    assert sizes_up_to(3000, 64) == (64, 128, 256, 512, 1024, 1408, 1728, 2048, 2752, 3000)
    assert sizes_up_to(1, 1) == (1,)


@given(st.integers(1, 200_000), st.integers(1, 200_000))
def test_another_budget_compiles_nothing_new(a, b):
    small, large = sizes_that_reach(min(a, b), 256), sizes_that_reach(max(a, b), 256)
    assert large[: len(small)] == small
    assert small[-1] >= min(a, b)


@given(st.integers(1, 8192))
def test_waste_is_at_most_a_quarter_of_a_large_step(tokens):
    _, ladder = family()
    size = ladder.fit(EncoderLoad(1, tokens, 1, 0, 1)).key.total_tokens
    assert size == 256 or 1 - tokens / size <= (0.28 if size > 1024 else 1 / 2)


@given(
    tokens=st.integers(1, 20_000),
    largest=st.integers(4, 20_000),
    windows=st.sampled_from([0, 16, 64]),
    floor=st.sampled_from([16, 256]),
    pairs=st.none() | st.lists(st.tuples(st.integers(8, 3000), st.integers(1, 8)), min_size=1, max_size=3),
)
def test_the_top_covers_the_budget_and_the_worst_item(tokens, largest, windows, floor, pairs):
    budgets, ladder = family(tokens, largest, windows, floor=floor, buckets=pairs)
    for size in (largest, budgets.max_num_tokens):
        worst_item = EncoderLoad(1, size, size // 4, -(-size // 10) if windows else 0, size // 4)
        assert ladder.fit(worst_item) is not None
    assert ladder.fit(EncoderLoad(1, budgets.max_num_tokens, 1, 0, budgets.max_output_rows)) is not None
    assert list(ladder.buckets) == sorted(ladder.buckets)


def test_only_the_last_bucket_pays_for_the_worst_windows():
    _, ladder = family(8192, 8192)
    ordinary = [b for b in ladder.buckets if b.window_rows > 1.6 * b.key.total_tokens / 64 and b.window_rows > 8]
    assert ordinary == [ladder.buckets[-1]]
    assert ladder.buckets[-1].window_rows == 820
    assert ladder.buckets[-1].key == (8192, 2048)
    assert ladder.buckets[-2].key == (8192, 128)
    _, plain = family(8192, worst=lambda tokens: -(-tokens // 64), worst_contexts=lambda tokens: 20)
    assert [b.key.total_tokens for b in plain.buckets] == list(sizes_that_reach(8192, 256))


def test_given_buckets_are_completed_by_one_that_reaches_the_budget():
    _, ladder = family(8192, 1024, windows=0, buckets=[(512, 4), (512, 4), (100, 1)])
    assert [b.key for b in ladder.buckets] == [(100, 1), (512, 4), (8192, 2048)]


def test_padding_is_counted():
    stats = PaddingStats()
    assert stats.snapshot()["waste"] == 0.0
    small, large = bucket(512, 1), bucket(1024, 1)
    stats.record(small, EncoderLoad(1, 300, 1, 0, 75))
    stats.record(small, EncoderLoad(1, 512, 1, 0, 128))
    stats.record(large, EncoderLoad(1, 768, 1, 0, 192))
    snapshot = stats.snapshot()
    assert (snapshot["runs"], snapshot["tokens"], snapshot["padded_tokens"]) == (3, 1580, 2048)
    assert snapshot["waste"] == pytest.approx(1 - 1580 / 2048)
    assert snapshot["buckets"]["512x1"] == {"runs": 2, "waste": pytest.approx(212 / 1024)}
    assert snapshot["buckets"]["1024x1"] == {"runs": 1, "waste": 0.25}
    stats.record(bucket(1024, 1, windows=85), EncoderLoad(1, 256, 1, 80, 64))
    assert stats.snapshot()["buckets"]["1024x1"] == {"runs": 2, "waste": 0.5}
