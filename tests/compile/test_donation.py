# SPDX-License-Identifier: Apache-2.0
"""Claim: KV pages, sampler state and embedding rows are updated in place: every step aliases them, none copies them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from llm_kit import noise

from mmjax.compilation import compile_all
from mmjax.encoder.runner import EncoderRunner
from mmjax.engine.runner import ModelRunner

MANY_BLOCKS, MANY_ROWS = 1 << 18, 1 << 23  # pools of 2 GiB, which nobody allocates


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def machine(tiny_llm):
    return tiny_llm().running.machine


@pytest.fixture(scope="module")
def large(machine):
    """Executables of the same steps over pools so large that a copy of one would dwarf everything else."""
    small, rows = machine.text, machine.encoder
    text = ModelRunner(
        small.family,
        small.cfg,
        small.params,
        small.config,
        device=small.device,
        pool=lambda: rows.pool,
        pool_rows=MANY_ROWS,
        banned_ids=(),
    )
    text.set_num_blocks(MANY_BLOCKS)
    bucket = rows.buckets[0]
    encoder = EncoderRunner(rows.family, rows.cfg, rows.params, rows.processor, [bucket], MANY_ROWS, device=rows.device)
    compile_all([*text.jobs(largest_only=True), *encoder.jobs()], device=small.device, progress=False)
    return text, encoder


def test_every_step_aliases_the_state_that_it_writes(machine):
    kv, slots = nbytes(machine.text.state.kv), nbytes(machine.text.state.slots)
    aliased = {name: step.memory_analysis().alias_size_in_bytes for name, step in machine.text.executables().items()}
    assert {name.split()[0] for name in aliased} == {"prefill", "decode", "sample", "remember"}
    assert aliased == {name: kv if name.startswith(("prefill", "decode")) else slots for name in aliased}


def test_every_write_aliases_the_row_pool(machine):
    steps = dict(machine.encoder.executables())
    read = steps.pop("read rows")
    aliased = {name: step.memory_analysis().alias_size_in_bytes for name, step in steps.items()}
    assert len(aliased) == len(machine.encoder.buckets) + 1  # and "write rows"
    assert aliased == dict.fromkeys(aliased, machine.encoder.pool.nbytes)
    assert read.memory_analysis().alias_size_in_bytes == 0


def test_no_step_keeps_a_copy_of_the_pools(machine, large):
    text, encoder = large
    kv, pool = MANY_BLOCKS * text.bytes_per_block(), MANY_ROWS * encoder.cfg.row_width * 4
    for name, step in text.executables().items():
        assert step.memory_analysis().temp_size_in_bytes < kv / 10, name
    for name, step in encoder.executables().items():
        assert step.memory_analysis().temp_size_in_bytes < pool / 4, name


def test_temporaries_do_not_grow_with_the_pools(machine, large):
    """Start-up sizes the KV pool by temporaries that it measured with a small one."""
    small = {**machine.text.executables(), **machine.encoder.executables()}
    for runner in large:
        for name, step in runner.executables().items():
            now, before = (x.memory_analysis().temp_size_in_bytes for x in (step, small[name]))
            assert now < before + (1 << 20), name  # the pools grew by more than ten times that


def test_rows_are_written_where_they_are(llm):
    """What the compiler promises is what happens: the new pool lies where the old one was."""
    encoder = llm.running.machine.encoder
    before = llm.running.call(lambda: encoder.pool.unsafe_buffer_pointer())
    llm.encode([noise(90, 130)])
    rows = np.ones((encoder.pool_rows, encoder.cfg.row_width), np.float32)
    llm.running.call(lambda: encoder.write(rows, np.arange(len(rows), dtype=np.int32)))
    assert llm.running.call(lambda: encoder.pool.unsafe_buffer_pointer()) == before
