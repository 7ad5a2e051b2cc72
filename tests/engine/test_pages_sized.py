# SPDX-License-Identifier: Apache-2.0
"""Claim: on a GPU the KV pool takes the share asked for of what weights, rows and steps leave, on a coarse grid."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import llm_kit
import numpy as np
import pytest

from mmjax import startup
from mmjax.config import EngineConfig, resolve_engine
from mmjax.engine.runner import ModelRunner
from mmjax.errors import ConfigError
from mmjax.loading import open_model
from mmjax.startup import BLOCK_GRID, SLACK, _num_blocks

LIMIT, WEIGHTS, ROWS, SLOTS, TEMP, PAGE = 10_000_000, 2_000_000, 64 * 100 * 4, 300_000, 1_000_000, 1_000


class Device(SimpleNamespace):
    platform, bytes_limit = "gpu", LIMIT

    def memory_stats(self) -> dict:
        return {"bytes_limit": self.bytes_limit}


def executable(temp: int, written: int = 0):
    """A step with `temp` bytes of temporaries, `written` bytes of results and a state updated in place."""
    sizes = {"temp_size_in_bytes": temp, "output_size_in_bytes": written + 500, "alias_size_in_bytes": 500}
    return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))


def blocks(**knobs) -> int:
    """Pages for 100 sequences of 100 pages each, unless `knobs` say otherwise."""
    text = SimpleNamespace(
        set_num_blocks=lambda blocks: None,
        bytes_per_block=lambda: PAGE,
        bytes_beside_pages=lambda: SLOTS,
        jobs=lambda largest_only: [],
        executables=lambda: {"prefill 8": executable(TEMP - 40, written=40), "decode 2": executable(10)},
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
    left = (LIMIT * (1 - SLACK) - WEIGHTS - ROWS - SLOTS - TEMP) * fraction / PAGE
    assert blocks(kv_cache_free_gpu_memory_fraction=fraction) == int(left) // BLOCK_GRID * BLOCK_GRID


def test_what_the_sampler_remembers_takes_memory_too(tiny_checkpoint):
    """Of each token of the vocabulary a flag and a count, for every sequence, and each sequence's last token."""
    device = jax.devices()[0]
    model = open_model(tiny_checkpoint("qwen2_vl", **llm_kit.CHECKPOINT).path, dtype="float32", device=device)
    config = resolve_engine(llm_kit.ENGINE, "gpu", model.cfg.max_position_embeddings)
    params = model.family.spec(model.cfg)["text"]
    text = ModelRunner(
        model.family, model.cfg, params, config, device=device, pool=lambda: None, pool_rows=1, banned_ids=()
    )
    text.set_num_blocks(3)
    assert text.bytes_beside_pages() == config.max_batch_size * (model.cfg.vocab_size * (1 + 4) + 4)
    text.allocate()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(text.state))
    assert held == text.bytes_beside_pages() + 3 * text.bytes_per_block()


def test_the_encoder_is_compiled_once(tiny_checkpoint, monkeypatch):
    """In the trial that tells what is left; of the text's steps that trial has the largest alone, with few pages."""
    names, compile_all = [], startup.compile_all

    def noted(jobs, **options):
        names.append([job.name for job in jobs])
        compile_all(jobs, **options)

    def sized(text, encoder, params, config, device, compile_jobs):
        return startup._blocks_left(text, encoder, params, config, Device(bytes_limit=1 << 30), compile_jobs)

    monkeypatch.setattr(startup, "compile_all", noted)
    monkeypatch.setattr(startup, "_num_blocks", sized)
    with llm_kit.build(tiny_checkpoint("qwen2_vl", **llm_kit.CHECKPOINT).path) as llm:
        machine = llm.running.machine
        assert len(llm.chat(llm_kit.user("hi"), llm_kit.GREEDY).token_ids) == 12
        trial, rest = names
        assert machine.text.layout.num_blocks % BLOCK_GRID == 0
        assert {"prefill 128", "decode 4", "sample 4"} <= set(trial)
        assert {*trial, *rest} == machine.encoder.executables().keys() | machine.text.executables().keys()
        assert set(trial) & set(rest) == {"prefill 128", "decode 4"}


def test_never_more_than_a_full_batch_needs():
    assert blocks(max_batch_size=2) == 256
    assert blocks(max_batch_size=1, max_seq_len=100) == BLOCK_GRID


def test_as_many_as_configured():
    assert blocks(num_blocks=101) == 101


def test_one_sequence_must_fit():
    with pytest.raises(ConfigError, match=r"2624 KV pages.*41984 tokens.*max_seq_len is 160000"):
        blocks(max_seq_len=160_000, kv_cache_free_gpu_memory_fraction=0.413)
