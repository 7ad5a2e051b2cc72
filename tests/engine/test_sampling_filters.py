# SPDX-License-Identifier: Apache-2.0
"""Claim: penalties and filters keep exactly the tokens that transformers' logits processors keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mmjax.layers import sampling
from mmjax.sampling_params import SamplingParams, SamplingRow, sampling_arrays

V, B = 257, 6

torch = pytest.importorskip("torch", reason="transformers' processors are the oracle")
processors = pytest.importorskip("transformers.generation.logits_process")


def _inputs(params: list[SamplingParams], vocab: int = V) -> sampling.SamplingInputs:
    rows = [SamplingRow(p, seed=i, step=0, eos_token_ids=()) for i, p in enumerate(params)]
    return jax.tree.map(jnp.asarray, sampling.SamplingInputs(**sampling_arrays(rows, len(rows), vocab)))


def _logits(seed: int, rows: int = B, vocab: int = V, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


@jax.jit
def _kept(scores, inputs):
    return sampling.kept_tokens(scores, sampling.log_weights(scores, inputs.temperature), inputs)


def _reference_kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scores = torch.from_numpy(logits)[None] / params.temperature
    steps = []
    if params.top_k:
        steps.append(processors.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(processors.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(processors.MinPLogitsWarper(params.min_p))
    for step in steps:
        scores = step(None, scores)
    return torch.isfinite(scores)[0].numpy()


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": V},
    {"top_k": V + 9},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.93},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
    {"top_k": 40, "top_p": 0.6, "temperature": 0.3},
    {},
]


@pytest.mark.parametrize("seed", range(4))
def test_filters_keep_what_transformers_keeps(seed):
    params = [SamplingParams(**knobs) for knobs in FILTERS]
    logits = _logits(seed, len(params))
    kept = np.asarray(_kept(logits, _inputs(params)))
    for row, param in enumerate(params):
        np.testing.assert_array_equal(kept[row], _reference_kept(logits[row], param), err_msg=str(FILTERS[row]))


@settings(deadline=None, max_examples=60)
@given(
    logits=hnp.arrays(np.float32, (B, 16), elements=st.floats(-50, 50, width=32), unique=True),
    top_k=st.integers(0, 18),
    top_p=st.floats(0.015625, 1.0, width=32),
)
def test_top_p_set_is_the_smallest_that_reaches_top_p(logits, top_k, top_p):
    params = [SamplingParams(top_k=top_k, top_p=top_p)] * B
    kept = np.asarray(_kept(logits, _inputs(params, 16)))
    for row, keep in zip(logits.astype(np.float64), kept, strict=True):
        order = np.argsort(-row)[: top_k or None]
        mass = np.exp(row[order] - row.max())
        above = np.concatenate([[0.0], np.cumsum(mass)[:-1]]) / mass.sum()
        # float32 sums decide tokens whose mass above lies within rounding of top_p
        assert keep[order[above < top_p - 1e-5]].all()
        assert not keep[order[above > top_p + 1e-5]].any() or top_p == 1
        assert not keep[np.argsort(-row)[len(order) :]].any()


def test_ties_stand_or_fall_together():
    logits = np.array([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0, -0.0, 0.0]], np.float32)
    assert np.asarray(_kept(logits, _inputs([SamplingParams(top_k=2)], 8)))[0].tolist() == [0, 1, 1, 1, 1, 0, 0, 0]
    assert np.asarray(_kept(logits, _inputs([SamplingParams(top_k=6)], 8))).all()  # -0.0 ties with 0.0
    assert np.asarray(_kept(logits, _inputs([SamplingParams(top_p=0.6)], 8)))[0].tolist() == [0, 1, 1, 1, 1, 0, 0, 0]


def test_infinite_and_extreme_logits_keep_the_most_probable_token():
    logits = np.full((4, 8), -np.inf, np.float32)
    logits[0, 3] = -1e38
    logits[1] = np.float32(3e38) * np.array([1, -1, 0, 0.5, -0.5, 0.9, 0, 0], np.float32)
    logits[2, 5] = 0.0
    logits[3, 6] = 1e-40
    params = [SamplingParams(top_k=3, top_p=0.5, min_p=0.1, temperature=1e-4)] * 4
    kept = np.asarray(_kept(logits, _inputs(params, 8)))
    tokens, _ = _sample(logits, _inputs(params, 8))
    assert [int(np.argmax(row)) for row in logits] == tokens.tolist()
    assert kept[np.arange(4), tokens].all()


def test_ordered_integers_follow_float_order():
    values = np.array([-np.inf, -3e38, -1.5, -1e-40, 0.0, 1e-40, 1e-38, 1.0, 3e38, np.inf], np.float32)
    order = np.asarray(sampling._ordered(values))
    assert (np.diff(order.astype(np.int64)) > 0).all()
    assert sampling._ordered(jnp.float32(-0.0)) == sampling._ordered(jnp.float32(0.0))


def _sample(logits, inputs, state=None, slots=None, banned=None):
    rows, vocab = logits.shape
    state = sampling.init_state(rows, vocab) if state is None else state
    slots = np.arange(rows, dtype=np.int32) if slots is None else slots
    banned = np.zeros(vocab, bool) if banned is None else banned
    out, state = jax.jit(sampling.sample)(logits, inputs, state, slots, banned)
    return np.asarray(out.tokens), state


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3])
def test_repetition_penalty_is_transformers(penalty):
    rng = np.random.default_rng(0)
    logits = _logits(1)
    prompt, answer = rng.integers(0, V, (B, 30)), rng.integers(0, V, (B, 9))
    state = sampling.init_state(B, V)
    slots = np.arange(B)
    state = sampling.record_prompt(state, slots.repeat(30), prompt.ravel())
    state = sampling.record_output(state, slots.repeat(9), answer.ravel())
    inputs = _inputs([SamplingParams(repetition_penalty=penalty)] * B)
    ours = jax.jit(sampling.penalise)(logits, inputs, state, slots)
    context = torch.from_numpy(np.concatenate([prompt, answer], axis=1))
    reference = processors.RepetitionPenaltyLogitsProcessor(penalty)(context, torch.from_numpy(logits))
    np.testing.assert_array_max_ulp(np.asarray(ours), reference.numpy(), maxulp=1)


def test_presence_and_frequency_penalties_count_the_answer_alone():
    logits = _logits(2, rows=2)
    state = sampling.record_prompt(sampling.init_state(3, V), np.full(2, 2), np.array([4, 5]))
    state = sampling.record_output(state, np.full(4, 2), np.array([5, 7, 7, 7]))
    inputs = _inputs([SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), SamplingParams()])
    ours = np.asarray(sampling.penalise(logits, inputs, state, np.array([2, 0])))
    expected = logits.copy()
    expected[0, 5] = logits[0, 5] - np.float32(0.25) - np.float32(0.5)
    expected[0, 7] = logits[0, 7] - np.float32(0.75) - np.float32(0.5)
    np.testing.assert_array_equal(ours, expected)


def test_penalties_steer_greedy_rows():
    logits = np.array([[2.0, 1.9, 0.0]], np.float32)
    inputs = _inputs([SamplingParams(temperature=0, frequency_penalty=1.0)], 3)
    tokens, state = _sample(logits, inputs)
    assert tokens.tolist() == [0]
    tokens, state = _sample(logits, inputs, state)
    assert tokens.tolist() == [1]
    assert np.asarray(state.output_counts).tolist() == [[1, 1, 0]]


def test_banned_and_early_stop_ids_are_never_drawn():
    logits = np.zeros((3, 6), np.float32)
    logits[:, 2], logits[:, 4], logits[:, 1] = 90.0, 80.0, 70.0
    banned = np.arange(6) == 2
    early = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[4])
    rows = [
        SamplingRow(early, 0, 1, (0,)),
        SamplingRow(early, 0, 2, (0,)),
        SamplingRow(SamplingParams(min_tokens=2), 0, 0, (4,)),
    ]
    inputs = sampling.SamplingInputs(**sampling_arrays(rows, 3, 6))
    tokens, _ = _sample(logits, inputs, banned=banned)
    assert tokens.tolist() == [1, 4, 1]
    tokens, _ = _sample(logits, None, banned=banned)
    assert tokens.tolist() == [4, 4, 4]
