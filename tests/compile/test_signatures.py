# SPDX-License-Identifier: Apache-2.0
"""Claim: pixels are no business of the text model's steps: they take rows of the pool, whatever made them."""

from __future__ import annotations

import jax


def test_text_steps_take_no_pixels(tiny_llm):
    machine = tiny_llm().running.machine
    pool = (machine.encoder.pool.shape, machine.encoder.pool.dtype)
    for name, step in machine.text.executables().items():
        arguments = [(x.shape, x.dtype.name) for x in jax.tree.leaves(step.in_avals)]
        assert not [shape for shape, dtype in arguments if dtype == "uint8"], name
        assert sum(one == (pool[0], pool[1].name) for one in arguments) == name.startswith("prefill"), name


def test_encoder_steps_take_bytes_and_nothing_of_the_text_model(tiny_llm):
    machine = tiny_llm().running.machine
    pages = machine.text.state.kv[0].shape
    for bucket in machine.encoder.buckets:
        step = machine.encoder._encode[bucket]
        arguments = [(x.shape, x.dtype.name) for x in jax.tree.leaves(step.in_avals)]
        patches = (bucket.key.total_tokens, machine.encoder.cfg.patch_values)
        assert [shape for shape, dtype in arguments if dtype == "uint8"] == [patches]
        assert pages not in [shape for shape, _ in arguments]
