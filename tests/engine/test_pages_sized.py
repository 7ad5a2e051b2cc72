# SPDX-License-Identifier: Apache-2.0
"""Claim: on a GPU the KV pool takes the share asked for of what weights, rows and steps leave, on a coarse grid."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mmjax.config import EngineConfig
from mmjax.errors import ConfigError
from mmjax.startup import BLOCK_GRID, SLACK, _num_blocks

LIMIT, WEIGHTS, ROWS, TEMP, PAGE = 10_000_000, 2_000_000, 64 * 100 * 4, 1_000_000, 1_000


class Device(SimpleNamespace):
    platform = "gpu"

    def memory_stats(self) -> dict:
        return {"bytes_limit": LIMIT}


def executable(temp: int):
    return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=temp))


def blocks(**knobs) -> int:
    """Pages for 100 sequences of 100 pages each, unless `knobs` say otherwise."""
    text = SimpleNamespace(
        set_num_blocks=lambda blocks: None,
        bytes_per_block=lambda: PAGE,
        jobs=lambda largest_only: [],
        executables=lambda: {"prefill 8": executable(TEMP), "decode 2": executable(10)},
    )
    encoder = SimpleNamespace(
        jobs=list,
        executables=lambda: {"encode 8": executable(TEMP // 2)},
        pool_rows=100,
        cfg=SimpleNamespace(row_width=64, dtype="float32"),
    )
    params = {"text": np.zeros(WEIGHTS, np.uint8)}
    defaults = {"max_batch_size": 100, "max_seq_len": 1600, "tokens_per_block": 16}
    return _num_blocks(text, encoder, params, EngineConfig(**defaults | knobs), Device(), lambda jobs: None)


@pytest.mark.parametrize("fraction", [0.9, 0.5])
def test_the_share_of_what_is_left(fraction):
    left = (LIMIT * (1 - SLACK) - WEIGHTS - ROWS - TEMP) * fraction / PAGE
    assert blocks(kv_cache_free_gpu_memory_fraction=fraction) == int(left) // BLOCK_GRID * BLOCK_GRID


def test_never_more_than_a_full_batch_needs():
    assert blocks(max_batch_size=2) == 256
    assert blocks(max_batch_size=1, max_seq_len=100) == BLOCK_GRID


def test_as_many_as_configured():
    assert blocks(num_blocks=101) == 101


def test_one_sequence_must_fit():
    with pytest.raises(ConfigError, match=r"2752 KV pages.*44032 tokens.*max_seq_len is 160000"):
        blocks(max_seq_len=160_000, kv_cache_free_gpu_memory_fraction=0.413)
