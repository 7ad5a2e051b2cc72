# SPDX-License-Identifier: Apache-2.0
"""Claim: what is built around cuDNN's calls is right, given that cuDNN does what its two functions here promise.

cuDNN needs a GPU (tests/gpu runs it); here plain masks stand in for the two calls, and give NaN where those promise
nothing.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kit import SCALE, Sequences, normal, offsets, with_padding
from tolerances import OTHER_LAYOUT

from kernels_pallas import attention_cudnn, cudnn
from kernels_pallas.reference import packed_attention_reference, window_attention_reference


def _masked(q, k, v, mask, scale):
    """Output [T, N, D] and log-sum-exp [N, T]; NaN for rows that `mask` leaves without a key."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.where(mask, jnp.einsum("tnd,cnd->ntc", q, k) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    out = jnp.einsum("ntc,cnd->tnd", jnp.exp(scores - lse[..., None]), v)
    covered = mask.any(-1)
    return jnp.where(covered[:, None, None], out, jnp.nan), jnp.where(covered, lse, jnp.nan)


def _packed(q, k, v, packing, scale, *, causal=False, residual=False):
    row, column = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])
    out, every = jnp.full(q.shape, jnp.nan), []
    for s in range(packing.q_lens.shape[0]):
        rows, columns = row - packing.q_starts[s], column - packing.kv_starts[s]
        mask = (rows >= 0) & (rows < packing.q_lens[s]) & (columns >= 0) & (columns < packing.kv_lens[s])
        mask = mask & (columns <= rows) if causal else mask
        one, lse = _masked(q, k, v, mask, scale)
        out = jnp.where(mask.any(-1)[:, None, None], one, out)
        every.append(jnp.roll(lse, -packing.q_starts[s], axis=-1))  # row i of the segment stands at i
    return (out, jnp.stack(every)) if residual else out


def _padded(q, k, v, q_lens, kv_lens, scale):
    row, column = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    masks = (row < q_lens[:, None, None]) & (column < kv_lens[:, None, None])
    return jax.vmap(lambda q, k, v, mask: _masked(q, k, v, mask, scale))(q, k, v, masks)


@pytest.fixture(params=["whole tables", "slabs"])
def stand_in(request, monkeypatch):
    """Puts the stand-ins in place; with slabs, pages are gathered one at a time."""
    public = jax.nn.dot_product_attention
    monkeypatch.setattr(cudnn, "packed_attention", _packed)
    monkeypatch.setattr(cudnn, "padded_attention", _padded)
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *a, implementation, **kw: public(*a, implementation="xla", **kw)
    )
    if request.param == "slabs":
        monkeypatch.setattr(attention_cudnn, "GATHER_BYTES", 1)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(30,), (12, 0, 9, 0), (0, 0)], ids=str)
def test_packed(lengths, causal):
    rng = np.random.default_rng(0)
    cu = offsets(*lengths)
    q, k, v = (with_padding(normal(rng, 40, n, 8), int(cu[-1]), np.nan) for n in (4, 2, 2))
    expected = jax.jit(packed_attention_reference, static_argnums=(4, 5))(q, k, v, cu, SCALE, causal)
    run = jax.jit(lambda *a: attention_cudnn.packed_attention_cudnn(*a, SCALE, causal))
    np.testing.assert_allclose(run(q, k, v, cu), expected, atol=OTHER_LAYOUT)


@pytest.mark.usefixtures("stand_in")
def test_windows():
    rng = np.random.default_rng(0)
    windows = offsets(8, 3, 0, 7)
    inputs = tuple(with_padding(normal(rng, 40, n, 8), 18, np.nan) for n in (4, 2, 2))
    expected = jax.jit(lambda *a: window_attention_reference(*a, SCALE, 8))(*inputs, windows)
    run = jax.jit(lambda *a: attention_cudnn.window_attention_cudnn(*a, SCALE, 8))
    np.testing.assert_allclose(run(*inputs, windows), expected, atol=OTHER_LAYOUT)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("prefixes", "chunks"),
    [([0, 0], [7, 9]), ([5, 0, 13, 0], [6, 9, 0, 1]), ([31, 3], [1, 17]), ([0], [0]), ([9], [3])],
    ids=str,
)
def test_prefill(prefixes, chunks):
    sequences = Sequences([p + c for p, c in zip(prefixes, chunks, strict=True)], filler=np.nan)
    run = jax.jit(lambda *a: attention_cudnn.paged_prefill_cudnn(*a, SCALE))
    step = sequences.prefill(prefixes, chunks, 24)
    check_prefill(*run(*step), sequences, prefixes, chunks)
    if not any(prefixes):
        check_prefill(*run(*step[:-1], step[-1].replace(any_prefix=False)), sequences, prefixes, chunks)


def check_prefill(out, pool, sequences, prefixes, chunks):
    first = 0
    for s, (prefix, chunk) in enumerate(zip(prefixes, chunks, strict=True)):
        expected = sequences.expected(s, prefix, prefix + chunk)
        np.testing.assert_allclose(out[first : first + chunk], expected, atol=OTHER_LAYOUT)
        first += chunk
    np.testing.assert_array_equal(out[first:], 0)
    np.testing.assert_array_equal(pool, sequences.pool(sequences.lengths))


def test_a_step_without_prefixes_has_no_loop(monkeypatch):
    """A loop whose length only the device knows makes the host wait for it."""
    monkeypatch.setattr(cudnn, "packed_attention", _packed)
    q, k, v, pool, meta = Sequences([7, 9]).prefill([0, 0], [7, 9], 24)
    lower = jax.jit(lambda *a: attention_cudnn.paged_prefill_cudnn(*a, SCALE)).lower
    assert "stablehlo.while" in lower(q, k, v, pool, meta).as_text()
    assert "stablehlo.while" not in lower(q, k, v, pool, meta.replace(any_prefix=False)).as_text()


@pytest.mark.usefixtures("stand_in")
def test_decode():
    sequences = Sequences([11, 1, 0, 32], filler=np.nan)
    run = jax.jit(lambda *a: attention_cudnn.paged_decode_cudnn(*a, SCALE))
    out, pool = run(*sequences.decode())
    for s, length in enumerate(sequences.lengths):
        expected = sequences.expected(s, length - 1, length) if length else np.zeros((1, 4, 8))
        np.testing.assert_allclose(out[s : s + 1], expected, atol=OTHER_LAYOUT)
    np.testing.assert_array_equal(pool, sequences.pool(sequences.lengths))


def test_the_private_function_is_the_one_known_here():
    """Where the version check says yes, the function takes what is passed to it."""
    assert cudnn.available()
    from jax._src.cudnn import fused_attention_stablehlo as private

    names = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "return_residual"}
    assert names <= inspect.signature(private.dot_product_attention).parameters.keys()
    assert {"PADDING", "PADDING_CAUSAL"} <= private.MaskType.__members__.keys()


@pytest.mark.parametrize(
    ("version", "known"), [((0, 10, 2), True), ((0, 11, 2), True), ((0, 9, 0), False), ((1, 0), False)]
)
def test_other_releases_fall_back(monkeypatch, version, known):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert cudnn.available() == known
