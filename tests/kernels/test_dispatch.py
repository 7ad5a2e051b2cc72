# SPDX-License-Identifier: Apache-2.0
"""Claim: implementations are chosen by capability alone, and the chosen callables never cause a second trace."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from attention_kit import SCALE, offsets

from kernels_pallas import cudnn, dispatch, mosaic
from kernels_pallas.dispatch import AttentionChoice, Device, choose

HOPPER, AMPERE, TURING = (Device("cuda", capability) for capability in ((9, 0), (8, 6), (7, 5)))
ALL_CUDNN = AttentionChoice("cudnn", "cudnn", "cudnn", "cudnn")
OWN_DECODE = AttentionChoice("cudnn", "cudnn", "cudnn", "mosaic")
NO_PACKING = AttentionChoice("xla", "cudnn", "xla", "cudnn")
ALL_XLA = AttentionChoice("xla", "xla", "xla", "xla")


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "expected"),
    [
        *((HOPPER, dtype, width, OWN_DECODE) for dtype in ("bfloat16", "float16") for width in (64, 80, 128, 256)),
        (HOPPER, "bfloat16", 72, ALL_CUDNN),
        (Device("cuda", (10, 0)), "bfloat16", 80, ALL_CUDNN),
        (HOPPER, "float32", 80, ALL_XLA),
        (HOPPER, "bfloat16", 36, ALL_XLA),
        (HOPPER, "bfloat16", 264, ALL_XLA),
        (AMPERE, "bfloat16", 80, NO_PACKING),
        (AMPERE, "bfloat16", 136, ALL_XLA),
        (TURING, "float16", 64, ALL_XLA),
        (Device("cpu"), "bfloat16", 64, ALL_XLA),
    ],
)
def test_choice(monkeypatch, device, dtype, head_dim, expected):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    for name in ("serves_packed", "serves_prefill"):
        monkeypatch.setattr(mosaic, name, lambda *kind: False)
    assert choose(device, dtype, head_dim) == expected


@pytest.mark.parametrize(
    ("version", "head_dim", "packed", "windowed"),
    [
        ((0, 11, 2), 80, "mosaic", "mosaic"),
        ((0, 11, 2), 72, "mosaic", "cudnn"),
        ((0, 11, 2), 128, "cudnn", "cudnn"),
        ((0, 10, 2), 80, "cudnn", "cudnn"),
    ],
)
def test_the_tower_depends_on_measurements_and_release(monkeypatch, version, head_dim, packed, windowed):
    flags = {72: (True, False), 80: (True, True), 128: (False, True)}
    table = {
        width: {"chosen": plain, "short": {"chosen": short}, "prefill": False}
        for width, (plain, short) in flags.items()
    }
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(mosaic, "packed_tuning", lambda: table)
    choice = choose(HOPPER, "bfloat16", head_dim)
    assert (choice.packed, choice.windowed, choice.prefill) == (packed, windowed, "cudnn")


@pytest.mark.parametrize(
    ("version", "page", "group", "decode"),
    [
        ((0, 11, 2), 16, 7, "mosaic"),
        ((0, 11, 2), 4, 7, "cudnn"),
        ((0, 11, 2), 64, 65, "cudnn"),
        ((0, 10, 2), 64, 7, "cudnn"),
    ],
)
def test_decode_depends_on_pages_heads_and_release(monkeypatch, version, page, group, decode):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert choose(HOPPER, "bfloat16", 128, page=page, group=group).decode == decode


@pytest.mark.parametrize(
    ("version", "head_dim", "page", "prefill"),
    [
        ((0, 11, 2), 128, 64, "mosaic"),
        ((0, 11, 2), 64, 16, "mosaic"),
        ((0, 11, 2), 80, 64, "cudnn"),
        ((0, 11, 2), 128, 4, "cudnn"),
        ((0, 10, 2), 128, 64, "cudnn"),
    ],
)
def test_prefill_depends_on_head_dim_pages_and_release(monkeypatch, version, head_dim, page, prefill):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert choose(HOPPER, "bfloat16", head_dim, page=page).prefill == prefill


def test_without_the_private_function_only_windows_use_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "available", lambda: False)
    monkeypatch.setattr(mosaic, "available", lambda capability: False)
    assert choose(HOPPER, "bfloat16", 80) == AttentionChoice(windowed="cudnn")


def test_cpu_report():
    assert dispatch.choices("cpu", "float32", 64) == ALL_XLA


@pytest.mark.parametrize(
    "choose_callable",
    [
        lambda: dispatch.vision_ops("cpu"),
        lambda: dispatch.prefill_attention("cpu"),
        lambda: dispatch.decode_attention("cpu"),
        dispatch.reference_vision_ops,
        dispatch.reference_attention,
    ],
    ids=["vision", "prefill", "decode", "reference vision", "reference text"],
)
def test_callables_are_equal_by_value(choose_callable):
    assert choose_callable() == choose_callable()
    assert hash(choose_callable()) == hash(choose_callable())


def test_a_second_engine_traces_nothing():
    run = jax.jit(lambda q, cu, ops: ops.packed(q, q, q, cu, SCALE), static_argnums=2)
    q = np.ones((4, 2, 8), np.float32)
    run(q, offsets(4), dispatch.vision_ops("cpu"))
    with jax.no_tracing():
        run(q, offsets(4), dispatch.vision_ops("cpu"))
