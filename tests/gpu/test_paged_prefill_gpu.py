# SPDX-License-Identifier: Apache-2.0
"""Claim: on Hopper, prefill through our own kernel equals plain masks, whatever pages and padding hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, Sequences
from tolerances import HALF_ATTENTION

from kernels_pallas import mosaic
from kernels_pallas.dispatch import PagedPrefill, choices, local_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not mosaic.available(local_device("gpu").compute_capability),
    reason="needs a Hopper GPU and the release of jax that the kernel is written for",
)

STEPS = {  # prefixes and chunks
    "no prefix": ((0,), (1000,)),
    "several, no prefix": ((0, 0, 0, 0), (300, 1, 65, 400)),
    "one token behind a prefix": ((777,), (1,)),
    "behind prefixes of all kinds": ((0, 1344, 64, 63), (190, 58, 1, 500)),
    "an empty chunk": ((0, 5, 100), (100, 0, 300)),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "page"),
    [(128, 28, 4, 64), (128, 32, 8, 16), (64, 14, 2, 64), (128, 8, 8, 128)],
    ids=str,
)
def test_equals_plain_masks(step, width, heads, kv_heads, page):
    from kernels_pallas.paged_prefill_mosaic import paged_prefill_mosaic

    prefixes, chunks = STEPS[step]
    lengths = [a + b for a, b in zip(prefixes, chunks, strict=True)]
    sequences = Sequences(
        lengths, heads, kv_heads, width, page, num_blocks=sum(-(-n // page) for n in lengths) + 3,
        table_width=2048 // page, filler=np.nan, dtype="bfloat16",
    )  # fmt: skip
    q, k, v, pool, meta = sequences.prefill(list(prefixes), list(chunks), tokens=1024)
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, pool))
    run = jax.jit(lambda *a: paged_prefill_mosaic(*a, SCALE / 2), donate_argnums=3)
    out, pool = (np.asarray(x, np.float32) for x in run(*arrays, meta))
    cu = meta.cu_seqlens
    for s, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        expected = sequences.expected(s, prefix, length, SCALE / 2)
        np.testing.assert_allclose(out[cu[s] : cu[s + 1]], expected, atol=HALF_ATTENTION["bfloat16"])
    np.testing.assert_array_equal(out[cu[-1] :], 0)
    np.testing.assert_array_equal(pool, sequences.pool(lengths))


def test_donated_pools_are_neither_copied_nor_waited_for():
    from kernels_pallas.paged_prefill_mosaic import paged_prefill_mosaic

    q, k = (jax.ShapeDtypeStruct((64, heads, 128), jnp.bfloat16) for heads in (28, 4))
    pool = jax.ShapeDtypeStruct((1000, 2, 4, 64, 128), jnp.bfloat16)
    meta = PagedPrefill(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (2,), (2, 512), (64,))))
    run = jax.jit(lambda *a: paged_prefill_mosaic(*a, SCALE), donate_argnums=3)
    step = run.lower(q, k, k, pool, meta).compile()
    memory, pool_bytes = step.memory_analysis(), pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10
    assert " while(" not in step.as_text()


@pytest.mark.parametrize("width", sorted(mosaic.packed_tuning()))
def test_is_chosen_where_the_table_says(width):
    assert (choices("gpu", "bfloat16", width).prefill == "mosaic") == mosaic.packed_tuning()[width]["prefill"]
