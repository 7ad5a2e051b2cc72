# SPDX-License-Identifier: Apache-2.0
"""Claim: a bad sampling knob is a RequestError that names the knob and its value; good ones pack into fixed shapes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from mmjax.errors import EngineError, RequestError
from mmjax.layers.sampling import SamplingInputs
from mmjax.sampling_params import (
    STOP_WIDTH,
    SamplingParams,
    SamplingRow,
    is_plain_greedy,
    sampling_arrays,
    seed_words,
)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens=0", "1.."]),
        ({"max_tokens": 2.5}, ["max_tokens=2.5", "integer"]),
        ({"max_tokens": True}, ["max_tokens=True", "integer"]),
        ({"min_tokens": -1}, ["min_tokens=-1"]),
        ({"min_tokens": 9, "max_tokens": 4}, ["min_tokens=9", "max_tokens=4"]),
        ({"temperature": -0.1}, ["temperature=-0.1", "at least 0"]),
        ({"temperature": float("nan")}, ["temperature=nan", "finite"]),
        ({"temperature": "hot"}, ["temperature='hot'", "number"]),
        ({"top_k": -2}, ["top_k=-2", "off"]),
        ({"top_k": 1.0}, ["top_k=1.0", "integer"]),
        ({"top_p": 0}, ["top_p=0", "temperature=0"]),
        ({"top_p": 1.01}, ["top_p=1.01", "0..1"]),
        ({"min_p": -0.5}, ["min_p=-0.5", "0..1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty=0"]),
        ({"presence_penalty": 2.5}, ["presence_penalty=2.5", "-2..2"]),
        ({"frequency_penalty": -3}, ["frequency_penalty=-3", "-2..2"]),
        ({"seed": 1.5}, ["seed=1.5", "integer"]),
        ({"seed": 2**64}, [f"seed={2**64}"]),
        ({"logprobs": 21}, ["logprobs=21", "0..20"]),
        ({"stop": ""}, ["stop=''", "at least one character"]),
        ({"stop": ["a", 3]}, ["stop=3"]),
        ({"stop_token_ids": [1, -1]}, ["stop_token_ids=-1"]),
        ({"stop_token_ids": range(17)}, ["17", "16"]),
        ({"ignore_eos": 1}, ["ignore_eos=1"]),
    ],
)
def test_bad_knobs_are_named(knobs, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**knobs)
    for word in words:
        assert word in str(caught.value)


def test_defaults_are_the_fields_and_forms_are_normalised():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.seed, params.logprobs, params.stop, params.stop_token_ids) == (None, None, (), ())
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=np.array([3, 4]).tolist()).stop_token_ids == (3, 4)
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_tiny_temperatures_are_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-30).greedy
    assert not SamplingParams(temperature=0.01).greedy


@pytest.mark.parametrize(
    ("knobs", "step", "plain"),
    [
        ({}, 0, True),
        ({"seed": 3, "top_k": 5, "stop": "x", "max_tokens": 3}, 0, True),
        ({"temperature": 0.5}, 0, False),
        ({"repetition_penalty": 1.1}, 0, False),
        ({"presence_penalty": 0.1}, 0, False),
        ({"frequency_penalty": -0.1}, 0, False),
        ({"logprobs": 0}, 0, False),
        ({"min_tokens": 2}, 1, False),
        ({"min_tokens": 2}, 2, True),
    ],
)
def test_is_plain_greedy(knobs, step, plain):
    row = SamplingRow(SamplingParams(**{"temperature": 0.0, **knobs}), 0, step, ())
    assert is_plain_greedy([None, row]) is plain


def test_arrays_have_the_fields_of_the_device_struct_and_neutral_padding():
    row = SamplingRow(SamplingParams(top_k=99, stop_token_ids=[5], min_tokens=3), 2**40 + 7, 2, (2, 4))
    arrays = sampling_arrays([None, row], 3, vocab_size=11)
    inputs = SamplingInputs(**arrays)
    assert {f.name for f in dataclasses.fields(inputs)} == set(arrays)
    assert all(len(array) == 3 for array in arrays.values())
    assert arrays["temperature"].tolist() == [0, 1, 0]
    assert arrays["top_k"].tolist() == [0, 11, 0]
    assert arrays["key"].tolist() == [[0, 0], [256, 7], [0, 0]]
    assert arrays["stop_ids"].tolist()[1] == [5, 2, 4] + [11] * (STOP_WIDTH - 3)
    assert arrays["step"].tolist() == [0, 2, 0]


def test_ignore_eos_leaves_the_end_of_sequence_drawable():
    row = SamplingRow(SamplingParams(ignore_eos=True, min_tokens=1), 0, 0, (2,))
    assert sampling_arrays([row], 1, 11)["stop_ids"].tolist() == [[11] * STOP_WIDTH]


def test_arrays_refuse_what_does_not_fit():
    row = SamplingRow(SamplingParams(), 0, 0, tuple(range(STOP_WIDTH + 1)))
    with pytest.raises(EngineError, match=rf"{STOP_WIDTH + 1} .*{STOP_WIDTH}"):
        sampling_arrays([row], 1, 99)
    with pytest.raises(EngineError, match=r"2 rows .* 1"):
        sampling_arrays([None, None], 1, 99)


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
def test_seed_words_are_jax_keys(seed):
    expected = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    assert list(seed_words(seed)) == np.asarray(expected).tolist()


def test_seeds_of_64_bits_and_negative_ones_are_all_distinct():
    assert seed_words(2**32 + 5) == (1, 5)
    assert seed_words(-1) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert len({seed_words(s) for s in (0, 1, -1, 2**32, 2**63, -(2**62))}) == 6
