# SPDX-License-Identifier: Apache-2.0
"""Claim: packed tables name the same segments, windows and positions as transformers' vision utilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pixels_kit import QWEN25, Config, Vision, noise, processor
from transformers import vision_utils

from mmjax.errors import EngineError
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey, Modality, VideoMetadata
from mmjax.models.images.packing import window_order
from mmjax.models.qwen3_vl.packing import pack_with_taps, table_taps
from mmjax.models.qwen_shared.sizes import count_windows, fewest_blocks, most_blocks, smart_resize


def bucket(items, tokens: int = 0, contexts: int = 0, windows: int = 0) -> EncoderBucket:
    """The smallest bucket for `items`, with room for some more."""
    tokens += sum(item.plan.encoder_tokens for item in items)
    contexts += sum(len(item.plan.contexts) for item in items)
    windows += sum(item.plan.windows for item in items)
    return EncoderBucket(EncoderGraphKey(tokens, contexts), windows, tokens // 4)


@pytest.fixture
def items(tmp_path):
    """Two pictures and a clip whose grids windows do not divide, and their processor."""
    mine = processor(tmp_path, QWEN25)
    clip = VideoMetadata(3, 10.0, (0, 1, 2))
    options = {"min_pixels": 784}
    return mine, [
        mine.image(noise(0, 140, 250, 3), options),
        mine.video(noise(1, 3, 56, 170, 3), clip, options),
        mine.image(noise(2, 28, 28, 3), options),
    ]


def test_tables_equal_the_reference(items):
    mine, batch = items
    packed = mine.pack(batch, bucket(batch, 8, 2, 3))
    grids = torch.tensor([item.plan.grid for item in batch])
    order, offsets = vision_utils.get_vision_window_index(grids, 2, 112, 14)
    windows = torch.unique_consecutive(offsets).tolist()
    assert packed.window_seqlens.tolist() == [*windows, *[windows[-1]] * 3]
    assert packed.row_order[: len(order)].tolist() == torch.argsort(order).tolist()
    assert packed.row_order.max() < len(packed.row_order) == len(order) + 2

    segments = vision_utils.get_vision_cu_seqlens(grids).tolist()
    assert packed.cu_seqlens.tolist() == [*segments, segments[-1], segments[-1]]
    assert packed.num_patches == segments[-1]
    blocks = np.concatenate([item.patches for item in batch]).reshape(len(order), -1)
    np.testing.assert_array_equal(packed.patches[: segments[-1]].reshape(blocks.shape), blocks[order])


def test_positions_equal_the_reference(items):
    mine, batch = items
    packed = mine.pack(batch, bucket(batch))
    grids = torch.tensor([item.plan.grid for item in batch])
    expected = vision_utils.get_vision_position_ids(grids, 2).numpy()
    order, _ = vision_utils.get_vision_window_index(grids, 2, 112, 14)
    np.testing.assert_array_equal(packed.positions.reshape(-1, 4, 2), expected.reshape(-1, 4, 2)[order])


def test_padding_never_carries_old_values(items):
    mine, batch = items
    room = bucket(batch, 16, 1, 2)
    full, part = mine.pack(batch, room), mine.pack(batch[:1], room)
    real = batch[0].plan.encoder_tokens
    np.testing.assert_array_equal(part.patches[:real], full.patches[:real])
    assert not part.patches[real:].any()
    assert not part.positions[real:].any()
    assert (part.window_seqlens[batch[0].plan.windows :] == real).all()


@pytest.mark.parametrize(
    ("short", "message"), [((-1, 0, 0), "patches"), ((0, -1, 0), "contexts"), ((0, 0, -1), "window rows")]
)
def test_a_bucket_that_is_too_small_is_named(items, short, message):
    mine, batch = items
    with pytest.raises(EngineError, match=f"3 items need .* {message}; the encoder bucket holds"):
        mine.pack(batch, bucket(batch, *short))


def test_towers_without_windows_get_no_windows_and_no_order(tmp_path):
    mine = processor(tmp_path, Config(Vision()))
    item = mine.image(noise(0, 60, 60, 3), {})
    assert item.plan.windows == mine.worst_windows(1000) == 0
    packed = mine.pack([item], bucket([item]))
    assert (packed.window_seqlens.tolist(), packed.row_order.tolist()) == ([0], [])
    np.testing.assert_array_equal(packed.patches, item.patches)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 13), columns=st.integers(1, 13), side=st.integers(1, 5))
def test_windows_hold_every_patch_once(rows, columns, side):
    order, lengths = window_order(2 * rows, 2 * columns, 2, side)
    assert len(lengths) == count_windows(rows, columns, side)
    assert sorted(order.tolist()) == list(range(rows * columns))
    assert lengths.sum() == 4 * rows * columns
    assert 0 < lengths.min() <= lengths.max() <= 4 * side**2


def reference_taps(grids: torch.Tensor, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries of a position table of `side` x `side` and their weights, int [P, 4] and float32 [P, 4]."""
    index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
        grids, num_grid_per_side=side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    return index.numpy(), weight.numpy()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 5, 48]))
def test_taps_into_a_table_of_positions(rows, columns, side):
    taps = table_taps(2 * rows, 2 * columns, 2, side)
    for ours, theirs in zip(taps, reference_taps(torch.tensor([[1, 2 * rows, 2 * columns]]), side), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_each_item_has_its_own_taps(items):
    """A picture turned over, which has as many patches, and a clip among them; padding mixes nothing."""
    mine, batch = items
    batch = [*batch, mine.image(noise(3, 250, 140, 3), {"min_pixels": 784})]
    packed = pack_with_taps(batch, bucket(batch, 8, 1), patch_values=3 * 2 * 14 * 14, merge=2, table_side=5)
    index, weight = reference_taps(torch.tensor([item.plan.grid for item in batch]), 5)
    real = int(packed.num_patches)
    assert batch[0].plan.encoder_tokens == batch[-1].plan.encoder_tokens
    assert len(index) == real == len(packed.patches) - 8
    np.testing.assert_array_equal(packed.table_index[:real], index)
    np.testing.assert_array_equal(packed.table_weight[:real], weight)
    assert not packed.table_weight[real:].any()


LIMITS = [(3136, 1003520), (3136, 12845056), (100352, 602112), (3136, 9800), (784, 784), (12544, 12544), (50000, 60000)]


@settings(max_examples=300, deadline=None)
@given(limits=st.sampled_from(LIMITS), height=st.integers(1, 9000), width=st.integers(1, 9000))
def test_bounds_hold_for_every_picture(limits, height, width):
    if max(height, width) > 200 * min(height, width):
        return
    rows, columns = (side // 28 for side in smart_resize(height, width, 28, *limits))
    assert fewest_blocks(28, *limits) <= rows * columns <= most_blocks(28, *limits)


def test_worst_windows_is_reached(tmp_path):
    """One by five merge blocks need two windows of four by four: the worst that photos and clips can be."""
    mine = processor(tmp_path, QWEN25)
    plan = mine.plan_image(28, 140, {})
    assert (plan.grid, plan.windows) == ((1, 2, 10), 2)
    assert mine.worst_windows(20) == 2
    assert mine.worst_windows(2000) == 200
    assert mine.plan_image(1000, 1000, {}).windows <= mine.worst_windows(5184)


def test_largest_items(tmp_path):
    mine = processor(tmp_path, preprocessor_config={}, video_preprocessor_config={"max_frames": 9})
    largest = mine.max_tokens_per_item()
    assert largest == {Modality.IMAGE: 1280 * 4, Modality.VIDEO: 1280 * 4}, "a clip counts as the largest picture"
    assert [mine.worst_contexts(tokens) for tokens in (3, 8, 10000)] == [1, 2, 5]
