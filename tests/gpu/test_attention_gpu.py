# SPDX-License-Identifier: Apache-2.0
"""Claim: on an NVIDIA GPU, the implementations chosen for half precision equal plain masks in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, Sequences, normal, offsets, with_padding
from tolerances import HALF_ATTENTION

from kernels_pallas import attention_cudnn
from kernels_pallas.dispatch import choices, decode_attention, prefill_attention, vision_ops
from kernels_pallas.reference import packed_attention_reference, window_attention_reference

WIDTHS = [64, 72, 80, 128]
KINDS = [*(("bfloat16", width) for width in WIDTHS), ("float16", 80)]
PATCHES = 640


def problem(dtype, width, heads=8, kv_heads=8, tokens=PATCHES, real=PATCHES, filler=np.nan):
    rng = np.random.default_rng(0)
    inputs = (with_padding(normal(rng, tokens, count, width), real, filler) for count in (heads, kv_heads, kv_heads))
    return tuple(jnp.asarray(x, dtype) for x in inputs)


def check(out, inputs, reference, *rest):
    """Half precision against the reference on the same, already rounded inputs."""
    out = np.asarray(out, np.float32)
    expected = jax.jit(lambda *a: reference(*a, *rest))(*(x.astype(jnp.float32) for x in inputs))
    np.testing.assert_allclose(out, expected, atol=HALF_ATTENTION[inputs[0].dtype.name])


@pytest.mark.parametrize(("dtype", "width"), KINDS)
def test_packed_through_cudnn(dtype, width):
    cu = offsets(300, 1, 0, 209, 0)
    inputs = problem(dtype, width, real=510)
    out = jax.jit(lambda *a: attention_cudnn.packed_attention_cudnn(*a, cu, SCALE / 2))(*inputs)
    check(out, inputs, packed_attention_reference, cu, SCALE / 2)


@pytest.mark.parametrize("lengths", [(640,), (200, 0, 333), (0, 0)], ids=str)
def test_packed_causal_with_grouped_heads(lengths):
    cu = offsets(*lengths)
    inputs = problem("bfloat16", 128, kv_heads=2, real=int(cu[-1]))
    out = jax.jit(lambda *a: vision_ops("gpu").packed(*a, cu, SCALE / 2, True))(*inputs)
    check(out, inputs, packed_attention_reference, cu, SCALE / 2, True)


@pytest.mark.parametrize("filler", [np.nan, 3e4])
def test_padding_may_hold_anything(filler):
    cu = offsets(300, 210)
    run = jax.jit(lambda *a: vision_ops("gpu").packed(*a, cu, SCALE / 2))
    clean, dirty = (run(*problem("bfloat16", 80, real=510, filler=x)).astype(jnp.float32) for x in (0.0, filler))
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize(("dtype", "width"), KINDS)
def test_windows_through_cudnn(dtype, width):
    windows = offsets(64, 64, 1, 0, 16, 64, 33, 0)
    inputs = problem(dtype, width, real=int(windows[-1]))
    out = jax.jit(lambda *a: attention_cudnn.window_attention_cudnn(*a, windows, SCALE / 2, 64))(*inputs)
    check(out, inputs, window_attention_reference, windows, SCALE / 2, 64)


def sequences(lengths, width, filler=np.nan):
    options = {"heads": 8, "kv_heads": 2, "page": 16, "num_blocks": 128, "table_width": 32, "dtype": "bfloat16"}
    return Sequences(lengths, width=width, filler=filler, **options)


def half(step):
    """The arrays of a step in bfloat16, its structs as they are."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16 if x.dtype == np.float32 else None), step)


def check_tokens(out, expected):
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=HALF_ATTENTION["bfloat16"])


def check_pool(pool, case):
    np.testing.assert_array_equal(pool.astype(jnp.float32), case.pool(case.lengths))


FRESH, MIXED, LONG = ([0, 0], [200, 120]), ([100, 0, 37, 0], [60, 129, 1, 0]), ([300], [40])


@pytest.mark.parametrize(
    ("width", "step", "gather_bytes"),
    [
        *((width, MIXED, 1 << 18) for width in WIDTHS),  # several slabs
        *((128, step, 64 << 20) for step in (FRESH, MIXED, LONG)),
    ],
    ids=str,
)
def test_prefill_through_cudnn(monkeypatch, width, step, gather_bytes):
    monkeypatch.setattr(attention_cudnn, "GATHER_BYTES", gather_bytes)
    check_prefill(attention_cudnn.paged_prefill_cudnn, step, width, 352)


@pytest.mark.parametrize("width", WIDTHS)
def test_prefill_through_what_is_chosen(width):
    check_prefill(prefill_attention("gpu"), MIXED, width, 352)


@pytest.mark.parametrize("step", [([100, 0, 37, 0], [20, 40, 1, 0]), ([300], [64])], ids=str)
def test_few_tokens_after_a_prefix(step):
    """These run through the decode kernel."""
    check_prefill(prefill_attention("gpu"), step, 128, 64)


def check_prefill(attend, step, width, tokens):
    prefixes, chunks = step
    case = sequences([p + c for p, c in zip(prefixes, chunks, strict=True)], width)
    run = jax.jit(lambda *a: attend(*a, SCALE / 2), donate_argnums=3)
    out, pool = run(*half(case.prefill(prefixes, chunks, tokens)))
    first = 0
    for s, (prefix, chunk) in enumerate(zip(prefixes, chunks, strict=True)):
        check_tokens(out[first : first + chunk], case.expected(s, prefix, prefix + chunk, SCALE / 2))
        first += chunk
    check_tokens(out[first:], 0)
    check_pool(pool, case)


def check_decode(attend, case):
    out, pool = jax.jit(lambda *a: attend(*a, SCALE / 2), donate_argnums=3)(*half(case.decode()))
    for s, length in enumerate(case.lengths):
        check_tokens(out[s : s + 1], case.expected(s, length - 1, length, SCALE / 2) if length else 0)
    check_pool(pool, case)


@pytest.mark.parametrize(
    ("width", "gather_bytes"), [(64, 1 << 18), (72, 64 << 20), (80, 64 << 20), (128, 1 << 18), (128, 64 << 20)]
)
def test_decode_through_cudnn(monkeypatch, width, gather_bytes):
    monkeypatch.setattr(attention_cudnn, "GATHER_BYTES", gather_bytes)
    check_decode(attention_cudnn.paged_decode_cudnn, sequences([300, 1, 0, 129, 16], width))


@pytest.mark.parametrize("width", WIDTHS)
def test_decode(width):
    check_decode(decode_attention("gpu"), sequences([300, 1, 0, 129, 16], width))


def test_real_rows_are_bit_equal_whatever_pages_hold():
    prefill = jax.jit(lambda *a: prefill_attention("gpu")(*a, SCALE / 2)[0])
    decode = jax.jit(lambda *a: decode_attention("gpu")(*a, SCALE / 2)[0])

    def both(filler):
        case = sequences([160, 129], 128, filler)
        return prefill(*half(case.prefill([100, 0], [60, 129], 256))), decode(*half(case.decode()))

    for clean, dirty in zip(both(0.0), both(np.nan), strict=True):
        np.testing.assert_array_equal(dirty.astype(jnp.float32), clean.astype(jnp.float32))


def test_float32_runs_in_xla():
    """What parity tests on a GPU use."""
    assert choices("gpu", "float32", 80).packed == "xla"
    inputs = problem("float32", 80, real=510)
    cu = offsets(300, 210)
    with jax.default_matmul_precision("highest"):
        out = jax.jit(lambda *a: vision_ops("gpu").packed(*a, cu, SCALE / 2))(*inputs)
        check(out, inputs, packed_attention_reference, cu, SCALE / 2)
