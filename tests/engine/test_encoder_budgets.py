# SPDX-License-Identifier: Apache-2.0
"""Claim: budgets A to D resolve in one place, in a fixed order, and what can't work is refused with the knob's name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from mmjax.encoder.budgets import bytes_per_row, parse_bytes, resolve_budgets
from mmjax.errors import ConfigError

MiB = 2**20


def config(**changes):
    fields = {"dtype": "bfloat16", "row_width": 16384, "hidden_size": 4096, "merge": 4, "window_capacity": 0}
    return SimpleNamespace(**(fields | changes))


def processor(worst_windows=None, **largest):
    return SimpleNamespace(
        max_tokens_per_item=lambda: largest, worst_windows=worst_windows or (lambda tokens: tokens // 64)
    )


def resolve(proc=None, cfg=None, **knobs):
    knobs = {"max_batch_size": 8, "max_num_tokens": 8192} | knobs
    return resolve_budgets(proc or processor(image=4096), cfg or config(), **knobs)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0), (134217728, 128 * MiB), ("128MiB", 128 * MiB), ("128 mb", 128 * MiB), ("1GB", 2**30), ("3 KiB", 3072),
        ("2TB", 2**41), ("17", 17), ("17b", 17), (" 5 gib ", 5 * 2**30),
    ],
)  # fmt: skip
def test_sizes_in_words(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("wrong", [-1, "-1", "1.5GB", "", "MiB", "12XB", "1PB", True, None, 2.0])
def test_sizes_that_are_none(wrong):
    with pytest.raises(ConfigError, match="encoder_cache_max_bytes"):
        parse_bytes(wrong, "encoder_cache_max_bytes")


def test_a_row_is_as_wide_as_the_first_source_that_knows():
    table = SimpleNamespace(shape=(1000, 4096), dtype=np.dtype("float32"))
    assert bytes_per_row(config(), "float32", table) == 65536
    assert bytes_per_row(config(), None, table) == 32768
    assert bytes_per_row(config(row_width=None), None, table) == 16384
    assert bytes_per_row(config(row_width=None)) == 8192
    nested = SimpleNamespace(dtype="float16", text_config=SimpleNamespace(hidden_size=10))
    assert bytes_per_row(nested) == 20
    with pytest.raises(ConfigError, match="width and dtype"):
        bytes_per_row(SimpleNamespace())


def test_output_bytes_of_a_large_budget():
    budgets = resolve(cfg=config(dtype="float16"), encoder_max_num_tokens=65536, encoder_cache_max_bytes=0)
    assert budgets.max_output_rows == 16384
    assert budgets.row_bytes == 32768
    assert budgets.output_bytes == 512 * MiB
    assert budgets.capacity_rows == 16384


def test_the_token_budget_is_raised_to_the_largest_item_with_one_warning(caplog):
    with caplog.at_level(logging.INFO, logger="mmjax.encoder.budgets"):
        budgets = resolve(processor(image=65536, video=1000), encoder_max_num_tokens=8192)
    assert (budgets.base_num_tokens, budgets.max_num_tokens, budgets.largest_item) == (8192, 65536, 65536)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "8192" in warnings[0]
    assert "65536" in warnings[0]
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(lines) == 1
    assert f"output_bytes={budgets.output_bytes}" in lines[0]


def test_defaults_come_from_the_language_model():
    budgets = resolve()
    assert (budgets.batch_size, budgets.max_num_tokens) == (8, 8192)
    assert resolve(encoder_batch_size=3, encoder_max_num_tokens=9000).batch_size == 3


@pytest.mark.parametrize(
    ("proc", "knobs", "words"),
    [
        (processor(image=16), {"max_num_tokens": None}, "encoder_max_num_tokens"),
        (processor(image=16), {"encoder_max_num_tokens": 0}, "encoder_max_num_tokens"),
        (processor(image=16), {"encoder_batch_size": 0}, "encoder_batch_size"),
        (processor(), {}, "no largest item"),
        (processor(image=16, video=0), {}, "largest video"),
        (processor(image=16), {"encoder_cache_max_bytes": "lots"}, "encoder_cache_max_bytes"),
    ],
)
def test_budgets_that_cannot_work(proc, knobs, words):
    with pytest.raises(ConfigError, match=words):
        resolve(proc, **knobs)


def test_attention_capacity_covers_the_worst_item_of_budget_b():
    assert resolve().attention_capacity == {"full": 2048}
    windows = resolve(processor(worst_windows=lambda tokens: tokens // 10, image=4096), config(window_capacity=64))
    assert windows.attention_capacity == {"full": 2048, "window": 819}
    with pytest.raises(ConfigError, match="window rows"):
        resolve(processor(worst_windows=lambda tokens: 0, image=4096), config(window_capacity=64))
    few = processor(image=4096)
    few.worst_contexts = lambda tokens: 384
    assert resolve(few).attention_capacity == {"full": 384}


def test_a_family_with_rows_of_its_own_says_how_many():
    breaks = processor(image=64)
    breaks.max_rows = lambda tokens: tokens // 4 + 10
    assert resolve(breaks, max_num_tokens=64).max_output_rows == 26


def test_resident_bytes_may_shrink_to_the_largest_item_only_with_chunks(caplog):
    row = 32768
    chunk = resolve(encoder_output_max_bytes=1024 * row, encoder_cache_max_bytes=0)
    assert (chunk.output_bytes, chunk.capacity_rows, chunk.max_output_rows) == (1024 * row, 1024, 2048)
    assert not caplog.records
    assert resolve(encoder_output_max_bytes=1000 * row).output_bytes == 1024 * row
    request = resolve(encoder_output_max_bytes=1024 * row, readiness="request")
    assert request.output_bytes == 2048 * row
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]


def test_one_pool_serves_both_uses_in_whole_rows():
    row = 32768
    assert resolve(encoder_cache_max_bytes=5000 * row + 1).capacity_rows == 5000
    assert resolve(encoder_cache_max_bytes=1).capacity_rows == 2048
    assert resolve(encoder_cache_max_bytes="1MiB").as_dict()["reuse_bytes"] == MiB
