# SPDX-License-Identifier: Apache-2.0
"""Claim: deepstack rows are cut like the rows they come with, and text and pictures run through one executable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stub_kit import StubEngine, item, talk
from tolerances import ROUNDING

from kernels_pallas.dispatch import reference_attention
from mmjax.engine.batch import Chunk, fill_rows
from mmjax.layers.fusion import gather_embeds
from mmjax.models.decoder import text

LEVELS, POOL_ROWS, TOKENS = 3, 40, 24  # the bucket holds the longest prompt of these tests


@dataclass
class Decoder:
    """Three layers that add nothing of their own, so that what is left in between is what deepstack adds."""

    step: Any
    width: int

    def states(self, request, begin: int, end: int, pool: np.ndarray) -> np.ndarray:
        """Hidden states [layer, end - begin, E] around every layer, of a chunk padded to the bucket."""
        ids, rows = np.zeros(TOKENS, np.int32), np.full(TOKENS, POOL_ROWS, np.int32)
        size = end - begin
        ids[:size] = request.token_ids(begin, end)
        fill_rows(rows[:size], ids[:size], Chunk(request, begin, end), row_slots)
        positions = np.zeros((3, TOKENS), np.int32)
        positions[:, :size] = request.positions(begin, end)
        return np.asarray(self.step(ids, rows, positions, pool))[:, :size]


@pytest.fixture(scope="module")
def decoder(tiny_llm):
    runner = tiny_llm("qwen2_5_vl").running.machine.text
    layer = {name: jnp.zeros_like(x) if name in ("o", "down") else x for name, x in runner.params["layers"][0].items()}
    vectors = jax.tree.map(lambda x: x[jnp.zeros(LEVELS, int)], runner.params["vectors"])
    params = {**runner.params, "layers": [layer] * LEVELS, "vectors": vectors}
    shape = replace(runner.cfg.text, num_layers=LEVELS, deepstack_layers=tuple(range(LEVELS)))
    cfg = replace(runner.cfg, text=shape)
    assert cfg.row_width == cfg.hidden_size * (1 + LEVELS)

    @jax.jit
    def step(ids, rows, positions, pool):
        hidden, deepstack = gather_embeds(params["embed"], ids, pool, rows)
        kv = ((),) * LEVELS
        states, _ = text.layer_outputs(params, cfg, hidden, positions, kv, None, reference_attention(), deepstack)
        return jnp.stack(states)

    return Decoder(step, cfg.hidden_size)


def row_slots(request, index: int) -> np.ndarray:
    """Rows of item i at 12 i + 20, 12 i + 19, ...: scattered through the pool, backwards."""
    count = len(request.prompt.items[index].row_positions)
    return (12 * index + 20 - np.arange(count)).astype(np.int32)


def pool_of(width: int, request) -> np.ndarray:
    """Level k of every row of the request is k; rows of nobody hold NaN."""
    pool = np.full((POOL_ROWS, width * (1 + LEVELS)), np.nan, np.float32)
    for placed in request.prompt.items:
        pool[row_slots(request, placed.index)] = np.repeat(np.arange(1 + LEVELS, dtype=np.float32), width)
    return pool


def request_of(*parts):
    return StubEngine().submit(talk(*parts))


@pytest.mark.parametrize("chunk", range(1, 23))
def test_each_layer_adds_its_level_to_rows_and_nothing_to_text(decoder, chunk):
    """8 text, an image of 6 rows, 8 text; the last chunk may be of one token."""
    request = request_of(8, item(1), 8)
    pool = pool_of(decoder.width, request)
    for begin in range(0, 22, chunk):
        end = min(begin + chunk, 22)
        added = np.diff(decoder.states(request, begin, end, pool), axis=0)
        visual = request.prompt.embed_mask[begin:end]
        for level in range(LEVELS):
            np.testing.assert_allclose(added[level][visual], level + 1, rtol=0, atol=ROUNDING)
            np.testing.assert_array_equal(added[level][~visual], 0)


@pytest.mark.parametrize(
    "parts",
    [(24,), (item(1, 12), item(2, 12)), (1, item(1, 9), 2, item(2, 11), 1), (item(1, 1), 5)],
    ids=["text", "rows alone", "two items", "one row"],
)
def test_a_full_bucket_and_neighbours(decoder, parts):
    request = request_of(*parts)
    added = np.diff(decoder.states(request, 0, request.prompt_len, pool_of(decoder.width, request)), axis=0)
    for level in range(LEVELS):
        wanted = np.where(request.prompt.embed_mask, level + 1, 0)
        np.testing.assert_allclose(added[level], np.broadcast_to(wanted[:, None], added[level].shape), atol=ROUNDING)


def test_text_first_or_pictures_first_run_through_one_executable(decoder):
    requests = {"text": request_of(13), "picture": request_of(4, item(1), 3)}
    results = []
    for order in (("text", "picture"), ("picture", "text")):
        for name in order:
            request = requests[name]
            states = decoder.states(request, 0, request.prompt_len, pool_of(decoder.width, request))
            results.append((name, states[-1]))
    assert decoder.step._cache_size() == 1
    for name in requests:
        first, second = [state for own, state in results if own == name]
        np.testing.assert_array_equal(first, second)


def test_text_alone_is_as_without_deepstack(decoder, tiny_llm):
    request = request_of(13)
    states = decoder.states(request, 0, 13, pool_of(decoder.width, request))
    embed = np.asarray(tiny_llm("qwen2_5_vl").running.machine.text.params["embed"])
    for state in states:
        np.testing.assert_array_equal(state, embed[request.prompt.token_ids])
