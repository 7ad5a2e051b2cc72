# SPDX-License-Identifier: Apache-2.0
"""Claim: items that share an encoder call do not see each other, and a call costs memory in proportion to patches."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llm_kit import noise, serving
from tolerances import OTHER_LAYOUT

from kernels_pallas.dispatch import vision_ops
from kernels_pallas.window_xla import window_attention_xla
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey

# Pictures of so many merge blocks of 28 x 28 pixels, as (height, width).
BLOCKS = {4: (56, 56), 5: (28, 140), 6: (56, 84), 8: (56, 112), 18: (84, 168), 60: (280, 168)}
GRIDS = [(4, 4), (6, 10), (2, 14)]  # patches; windows of 4 x 4 cover the first alone


class Tower:
    """The tower of a tiny LLM through its compiled buckets, as the engine calls it."""

    def __init__(self, llm):
        self.llm = llm
        self.encoder = llm.running.machine.encoder

    def item(self, size: tuple[int, int], seed: int = 0):
        processor = self.encoder.processor
        return processor.image(noise(*size, seed), {})

    def rows(self, *items, bucket: EncoderBucket | None = None) -> list[np.ndarray]:
        """Rows of each item, encoded together."""
        bucket = bucket or self.encoder.buckets[0]
        ends = np.cumsum([0, *(item.plan.rows for item in items)])
        slots = [np.arange(*pair, dtype=np.int32) for pair in pairwise(ends)]

        def encode():
            self.encoder.encode(self.encoder.pack(items, bucket), slots, bucket)
            return [self.encoder.read(where) for where in slots]

        return self.llm.running.call(encode)


@pytest.fixture(params=["qwen2_vl", "qwen2_5_vl"])
def tower(request, tiny_llm):
    with serving(tiny_llm(request.param)) as llm:
        compiled = llm.running.machine.counter.count
        yield Tower(llm)
        assert llm.running.machine.counter.count == compiled


@pytest.mark.parametrize(
    "batches",
    [([4, 6, 8], [5, 5, 8], [18]), ([5, 5, 8], [4, 6, 8]), ([18], [8, 5, 5], [4, 6, 8]), ([60, 4], [4, 60])],
    ids=lambda batches: str(batches[0]),
)
def test_equal_totals_with_other_boundaries(tower, batches):
    """One executable serves them all, and nothing of one call is left in the next."""
    for sizes in batches:
        items = [tower.item(BLOCKS[size], seed) for seed, size in enumerate(sizes)]
        together = tower.rows(*items)
        for item, rows in zip(items, together, strict=True):
            (alone,) = tower.rows(item)
            np.testing.assert_allclose(rows, alone, rtol=0, atol=OTHER_LAYOUT)


def test_any_choice_of_items_in_any_order(tower):
    items = [tower.item(BLOCKS[size], seed) for seed, size in enumerate((4, 6, 8))]
    alone = [tower.rows(item)[0] for item in items]
    for chosen in ([2, 0], [1], [0, 2, 1], [1, 1, 0]):
        for index, rows in zip(chosen, tower.rows(*[items[i] for i in chosen]), strict=True):
            np.testing.assert_allclose(rows, alone[index], rtol=0, atol=OTHER_LAYOUT)


def test_buckets_agree(tower):
    item = tower.item(BLOCKS[18])
    (expected,) = tower.rows(item)
    for bucket in tower.encoder.buckets:
        np.testing.assert_allclose(tower.rows(item, bucket=bucket)[0], expected, rtol=0, atol=OTHER_LAYOUT)


@pytest.mark.parametrize("other", GRIDS, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_neighbour_changes_no_bit(tower, grid, other):
    """Not its pixels, and not its absence."""
    mine = tower.item((14 * grid[0], 14 * grid[1]), seed=1)
    neighbours = [tower.item((14 * other[0], 14 * other[1]), seed) for seed in (2, 3)]
    first = [tower.rows(mine, neighbour)[0] for neighbour in neighbours]
    np.testing.assert_array_equal(*first)
    np.testing.assert_array_equal(first[0], tower.rows(mine)[0])
    behind = [tower.rows(neighbour, mine)[1] for neighbour in neighbours]
    np.testing.assert_array_equal(*behind)
    np.testing.assert_allclose(behind[0], first[0], rtol=0, atol=OTHER_LAYOUT)


def test_a_window_sees_nothing_outside(tiny_llm):
    """Windows as the engine packs them: three grids in one call, none a multiple of the window but the first."""
    encoder = tiny_llm("qwen2_5_vl").running.machine.encoder
    items = [encoder.processor.image(noise(14 * h, 14 * w, h), {}) for h, w in GRIDS]
    inputs = encoder.pack(items, encoder.buckets[0])
    windows, count = np.asarray(inputs.window_seqlens), int(inputs.num_patches)
    assert count == sum(h * w for h, w in GRIDS)
    window_of = np.repeat(np.arange(len(windows) - 1), np.diff(windows))
    assert len(window_of) == count
    positions = np.asarray(inputs.positions)[:count] // 4
    for start, end in ((0, 16), (16, 76), (76, 104)):  # patches of one window lie in one 4 x 4 cell of one item
        cells = {tuple(cell): set() for cell in positions[start:end]}
        for patch in range(start, end):
            cells[tuple(positions[patch])].add(window_of[patch])
        assert all(len(windows) == 1 for windows in cells.values())
        assert len(set.union(*cells.values())) == len(cells)

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((len(inputs.patches), 2, 16), np.float32) for _ in range(3))
    attend = jax.jit(window_attention_xla, static_argnums=(4, 5))
    before = np.asarray(attend(q, k, v, windows, 0.25, 16))
    for patch in (0, 17, 40, 75, 76, 103):
        moved = [x.copy() for x in (q, k, v)]
        for x in moved:
            x[patch] += 1
        changed = (np.asarray(attend(*moved, windows, 0.25, 16)) != before).any(axis=(1, 2))[:count]
        np.testing.assert_array_equal(changed, window_of == window_of[patch])


def test_memory_of_a_tower_is_linear_in_its_patches(tiny_llm):
    encoder = tiny_llm("qwen2_5_vl").running.machine.encoder
    table = jax.ShapeDtypeStruct((3, 256), jnp.float32)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), encoder.params)
    step = jax.jit(encoder.family.encode, static_argnums=(1, 4))

    def temp(patches: int) -> int:
        bucket = EncoderBucket(EncoderGraphKey(patches, 8), patches // 16 + 8, patches // 4)
        inputs = encoder.family.vision_inputs(encoder.cfg, bucket)
        lowered = step.lower(params, encoder.cfg, inputs, table, vision_ops("cpu"))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    sizes = [temp(patches) for patches in (1024, 2048, 4096, 8192)]  # attention in whole blocks: not exactly double
    assert all(large <= 2.2 * small for small, large in pairwise(sizes)), sizes
    assert sizes[-1] < 9 * sizes[0]
