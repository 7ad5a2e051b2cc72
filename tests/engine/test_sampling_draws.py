# SPDX-License-Identifier: Apache-2.0
"""Claim: draws follow softmax, depend on nothing but their own request, and the sampler updates its memory in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from tolerances import FLOAT32_RELATIVE

from mmjax.layers import sampling
from mmjax.sampling_params import MAX_LOGPROBS, SamplingParams, SamplingRow, sampling_arrays

V = 96


def _inputs(rows, batch, vocab=V):
    return sampling.SamplingInputs(**sampling_arrays(rows, batch, vocab))


@functools.cache
def _jitted():
    return jax.jit(sampling.sample)


def _sample(logits, inputs, slots=None, state=None):
    rows, vocab = logits.shape
    slots = np.arange(rows, dtype=np.int32) if slots is None else slots
    state = sampling.init_state(rows, vocab) if state is None else state
    return _jitted()(logits, inputs, state, slots, np.zeros(vocab, bool))


def _logits(rows, vocab=V, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 2).astype(np.float32)


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 0.5}, range(8)),
        ({"temperature": 2.0, "top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.5}, [0, 1]),
        ({"min_p": 0.1}, [0, 1, 2, 3]),
    ],
)
def test_draws_follow_softmax_of_the_kept_tokens(knobs, kept):
    """Chi-square over 16,384 draws: 1,024 seeds at 16 steps each; the bound has a false alarm rate of 1e-6."""
    probabilities = np.array([0.4, 0.25, 0.15, 0.08, 0.039, 0.037, 0.024, 0.02])
    rows, steps = 1024, 16
    logits = np.tile(np.log(probabilities).astype(np.float32), (rows, 1))
    params = SamplingParams(**knobs)
    counts = np.zeros(8, int)
    for step in range(steps):
        batch = [SamplingRow(params, seed, step, ()) for seed in range(rows)]
        out, _ = _sample(logits, _inputs(batch, rows, 8))
        counts += np.bincount(np.asarray(out.tokens), minlength=8)
    kept = list(kept)
    weights = probabilities[kept] ** (1 / params.temperature)
    expected = weights / weights.sum() * rows * steps
    assert counts.sum() == counts[kept].sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    assert statistic < scipy.stats.chi2.isf(1e-6, len(kept) - 1)


def test_noise_is_finite_falls_with_its_bits_and_reaches_far_enough_for_rare_tokens():
    """The largest value is that of half a step of 2**-32; 24 bits of uniform would end at 16.6."""
    noise = np.asarray(sampling.gumbel_of_bits(np.array([0, 1, 2**16, 2**31, 2**32 - 2**9, 2**32 - 1], np.uint32)))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) < 0).all()
    np.testing.assert_allclose(noise[[0, 3]], [33 * np.log(2), -np.log(np.log(2))], rtol=FLOAT32_RELATIVE)


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2),
    SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=[3]),
]


def test_a_draw_knows_nothing_of_batch_mates_rows_slots_or_padding():
    """Bitwise: each request alone, and in every rotation of a mixed batch with NaN padding rows."""
    logits = _logits(len(MIXED))
    rows = [SamplingRow(params, 100 + i, 3, (5,)) for i, params in enumerate(MIXED)]
    batch = 8
    history = np.random.default_rng(1).integers(0, V, (len(MIXED), 12))

    def run(order: list[int], slots: list[int]):
        state = sampling.init_state(batch, V)
        state = state.replace(output_counts=state.output_counts + 7)  # what earlier owners of the slots left
        state = sampling.reset(state, np.array(slots))
        for request, slot in zip(order, slots, strict=True):
            state = sampling.record_prompt(state, np.full(8, slot), history[request, :8])
            state = sampling.record_output(state, np.full(4, slot), history[request, 8:])
        stacked = np.full((batch, V), np.nan, np.float32)
        stacked[: len(order)] = logits[order]
        padded = np.full(batch, batch, np.int32)
        padded[: len(slots)] = slots
        out, _ = _sample(stacked, _inputs([rows[i] for i in order], batch), padded, state)
        return dict(zip(order, np.asarray(out.tokens).tolist(), strict=False)), np.asarray(out.logprobs)

    alone = {i: run([i], [3])[0][i] for i in range(len(MIXED))}
    for shift in range(len(MIXED)):
        order = [(i + shift) % len(MIXED) for i in range(len(MIXED))]
        tokens, _ = run(order, [(5 * i + shift) % batch for i in range(len(MIXED))])
        assert tokens == alone


def test_streams_differ_by_seed_and_step_and_repeat():
    rows, steps = 4, 12
    logits = np.zeros((rows, V), np.float32)

    def stream(seeds):
        tokens = []
        for step in range(steps):
            batch = [SamplingRow(SamplingParams(), seed, step, ()) for seed in seeds]
            tokens.append(np.asarray(_sample(logits, _inputs(batch, rows))[0].tokens))
        return np.stack(tokens, axis=1).tolist()

    first, again = stream([1, 2, 2**33, -5]), stream([2, 2**33, -5, 1])
    assert first[1:] + first[:1] == again
    assert len({tuple(s) for s in first}) == 4
    assert all(len(set(s)) > steps // 2 for s in first)


def test_the_greedy_executable_agrees_with_the_full_one():
    logits = _logits(5)
    rows = [SamplingRow(SamplingParams(temperature=0.0), 0, 0, ())] * 5
    full, state = _sample(logits, _inputs(rows, 5))
    lean, same = _sample(logits, None)
    np.testing.assert_array_equal(full.tokens, logits.argmax(axis=-1))
    np.testing.assert_array_equal(lean.tokens, full.tokens)
    assert lean.top_ids is None
    assert np.asarray(state.output_counts).sum() == 5
    assert np.asarray(same.output_counts).sum() == 0


def test_logprobs_are_of_the_models_own_distribution():
    logits = _logits(2)
    rows = [
        SamplingRow(SamplingParams(temperature=0.3, top_k=4, repetition_penalty=2.0, logprobs=5), 7, 0, ()),
        SamplingRow(SamplingParams(temperature=0.0, logprobs=0), 8, 0, ()),
    ]
    state = sampling.record_prompt(sampling.init_state(2, V), np.zeros(V, int), np.arange(V))
    out, _ = _sample(logits, _inputs(rows, 2), state=state)
    wide = logits.astype(np.float64)
    expected = wide - scipy.special.logsumexp(wide, axis=-1, keepdims=True)
    tokens = np.asarray(out.tokens)
    np.testing.assert_allclose(out.logprobs, expected[[0, 1], tokens], rtol=FLOAT32_RELATIVE)
    order = np.argsort(-expected, axis=-1)[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(expected, order, axis=-1), rtol=FLOAT32_RELATIVE)


def test_nobody_asked_means_no_logprobs():
    out, _ = _sample(_logits(2), _inputs([SamplingRow(SamplingParams(), 7, 0, ())], 2))
    assert not np.asarray(out.logprobs).any()
    assert out.top_ids.shape == (2, MAX_LOGPROBS)


def test_padding_rows_and_ids_write_nothing():
    state = sampling.init_state(3, V)
    state = sampling.record_prompt(state, np.array([3, 0, 9]), np.array([1, V, 1]))
    state = sampling.record_output(state, np.array([3, 0, 9]), np.array([1, V + 4, 1]))
    state = sampling.reset(state, np.array([3, 7]))
    _, state = _sample(_logits(4), _inputs([], 4), np.array([3, 1, 3, 50], np.int32), state)
    assert not np.asarray(state.prompt_seen).any()
    assert np.asarray(state.output_counts).sum(axis=1).tolist() == [0, 1, 0]


def test_reset_forgets_only_its_slots():
    state = sampling.record_output(sampling.init_state(3, V), np.array([0, 1, 2]), np.array([5, 5, 5]))
    state = sampling.record_prompt(state, np.array([0, 1, 2]), np.array([6, 6, 6]))
    state = sampling.reset(state, np.array([1, 3]))
    assert np.asarray(state.output_counts).sum(axis=1).tolist() == [1, 0, 1]
    assert np.asarray(state.prompt_seen).sum(axis=1).tolist() == [1, 0, 1]


@pytest.mark.parametrize("name", ["sample", "sample_greedy", "record_prompt", "record_output", "reset"])
def test_the_memory_is_updated_in_place(name):
    """All bytes of the donated state are aliased, and no temporary is as large as it."""
    slots, vocab, rows = 64, 4096, 2
    struct = jax.ShapeDtypeStruct
    state = jax.eval_shape(lambda: sampling.init_state(slots, vocab))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    ints = struct((rows,), jnp.int32)
    if name.startswith("sample"):
        inputs = jax.tree.map(lambda a: struct(a.shape, a.dtype), _inputs([], rows, vocab))
        jitted = jax.jit(sampling.sample, donate_argnames="state")
        logits, banned = struct((rows, vocab), jnp.float32), struct((vocab,), bool)
        lowered = jitted.lower(logits, None if name == "sample_greedy" else inputs, state, ints, banned)
    else:
        arguments = (ints,) if name == "reset" else (ints, ints)
        lowered = jax.jit(getattr(sampling, name), donate_argnums=0).lower(state, *arguments)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 2
