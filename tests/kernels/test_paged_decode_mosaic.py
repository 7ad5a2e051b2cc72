# SPDX-License-Identifier: Apache-2.0
"""Claim: the decode kernel lowers for Hopper at every size it says it serves, and parts of sequences add up.

Its values need a GPU (tests/gpu runs them).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, normal, plain_attention

from kernels_pallas import mosaic
from kernels_pallas.paged_decode_mosaic import Plan, join_parts, make_plan, paged_decode_mosaic, tuning
from kernels_pallas.paged_kv import PagedDecode

needs_mosaic = pytest.mark.skipif(not mosaic.available((9, 0)), reason="the kernel is written for another jax")


def _ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def problem(batch=3, heads=28, kv_heads=4, width=128, page=64, table_width=16, dtype="bfloat16"):
    """Shapes of (q, k, v, pool, meta)."""
    q, k = (jax.ShapeDtypeStruct((batch, n, width), dtype) for n in (heads, kv_heads))
    pool = jax.ShapeDtypeStruct((64, 2, kv_heads, page, width), dtype)
    return q, k, k, pool, PagedDecode(_ints(batch), _ints(batch, table_width), _ints(batch))


@needs_mosaic
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"batch": 256},
        {"batch": 64, "table_width": 512},
        {"heads": 32, "kv_heads": 8, "page": 16},
        {"heads": 16, "kv_heads": 2, "page": 32, "dtype": "float16"},
        {"heads": 14, "kv_heads": 2, "width": 64},
        {"heads": 8, "kv_heads": 8, "width": 80, "page": 128},
        {"heads": 8, "kv_heads": 2, "width": 256},
        {"heads": 8, "kv_heads": 2, "page": 128},
    ],
    ids=str,
)
def test_lowers_for_hopper(sizes):
    shapes = problem(**sizes)
    q, k, _, pool, _ = shapes
    assert mosaic.serves_decode(q.dtype, q.shape[2], pool.shape[3], q.shape[1] // k.shape[1])
    traced = jax.jit(lambda *a: paged_decode_mosaic(*a, SCALE)).trace(*shapes)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dtype", "width", "page", "group", "served"),
    [
        ("bfloat16", 128, 64, 7, True),
        ("float16", 64, 16, 16, True),
        ("float32", 128, 64, 7, False),
        ("bfloat16", 72, 64, 7, False),
        ("bfloat16", 512, 64, 7, False),
        ("bfloat16", 128, 4, 7, False),
        ("bfloat16", 128, 48, 7, False),
        ("bfloat16", 128, 128, 7, True),
        ("bfloat16", 256, 64, 7, True),
        ("bfloat16", 256, 128, 7, False),
        ("bfloat16", 128, 64, 65, False),
    ],
)
def test_what_is_served(dtype, width, page, group, served):
    assert mosaic.serves_decode(dtype, width, page, group) == served


@pytest.mark.parametrize(
    ("version", "capability", "available"),
    [
        ((0, 11, 2), (9, 0), True),
        ((0, 10, 2), (9, 0), False),
        ((0, 11, 1), (9, 0), False),
        ((0, 12), (9, 0), False),
        ((0, 11, 2), (10, 0), False),
    ],
)
def test_where_it_is_available(monkeypatch, version, capability, available):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert mosaic.available(capability) == available


def test_every_batch_has_a_row_in_the_table():
    rows = tuning()
    bounds = [row["programs"] for row in rows]
    assert bounds[-1] is None
    assert bounds[:-1] == sorted(bounds[:-1])


@pytest.mark.parametrize("batch", [1, 16, 64, 256])
@pytest.mark.parametrize("capacity", [1024, 32768])
def test_a_short_table_is_never_cut_into_more_parts_than_it_can_fill(batch, capacity):
    q, _, _, pool, _ = problem(batch)
    plan = make_plan(q, pool, capacity // 64)
    assert plan.splits == int(plan.parts(jnp.int32(capacity))) or plan.splits * plan.split_tokens < capacity
    assert int(plan.parts(jnp.int32(0))) == int(plan.parts(jnp.int32(1))) == 1


def test_parts_add_up_whatever_lies_where_no_part_was_written():
    """Three sequences of 2, 1 and 0 parts of 8 tokens; one key head, a group of 3 in 8 rows."""
    plan = Plan("float32", 3, 1, 3, 16, 8, 8, 2, splits=2, split_tokens=8)
    rng = np.random.default_rng(0)
    lens, out, lse = np.array([16, 8, 0], np.int32), np.full((3, 1, 2, 8, 16), np.nan), np.full((3, 1, 2, 8), np.nan)
    out[2, :, 0], lse[2, :, 0] = 0, -1e30  # a padding row's only part has seen nothing
    expected = np.zeros((3, 3, 16))
    for s, length in enumerate(lens[:2]):
        q, k, v = normal(rng, 1, 3, 16), normal(rng, length, 1, 16), normal(rng, length, 1, 16)
        expected[s] = plain_attention(q, k, v)[0]
        for part in range(length // 8):
            keys, values = k[part * 8 : part * 8 + 8], v[part * 8 : part * 8 + 8]
            out[s, 0, part, :3] = plain_attention(q, keys, values)[0]
            scores = np.einsum("nd,cd->nc", q[0], keys[:, 0]) * SCALE
            lse[s, 0, part, :3] = np.log2(np.exp(scores).sum(-1))
            out[s, 0, part, 3:], lse[s, 0, part, 3:] = 0, 0
    joined = jax.jit(join_parts, static_argnums=0)(plan, lens, out.reshape(-1, 16).astype(np.float32), lse.reshape(-1))
    np.testing.assert_allclose(joined[:, 0], expected, atol=1e-5)
