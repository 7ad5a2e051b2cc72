# SPDX-License-Identifier: Apache-2.0
"""Claim: rotary positions of any mixture of text, images and clips equal transformers' `get_rope_index`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pixels_kit import QWEN25, Config, processor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from mmjax.inputs.items import ItemPlan, Modality
from mmjax.models.qwen_shared.positions import mrope_positions

TEXT = 3  # any id of text
FLOORS_PRODUCT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)


def plan(modality: Modality, grid: tuple[int, int, int], seconds: float | None = None) -> ItemPlan:
    rows = grid[0] * grid[1] * grid[2] // 4
    return ItemPlan(
        modality=modality,
        grid=grid,
        rows=rows,
        contexts=(grid[1] * grid[2],) * grid[0],
        windows=0,
        span_ids=np.full(rows, {Modality.IMAGE: 7, Modality.VIDEO: 8}[modality], np.int32),
        span_embed=np.ones(rows, bool),
        seconds_per_step=seconds,
    )


def image(rows: int, columns: int) -> ItemPlan:
    """Of merged rows and columns."""
    return plan(Modality.IMAGE, (1, 2 * rows, 2 * columns))


def clip(steps: int, rows: int, columns: int, seconds: float) -> ItemPlan:
    return plan(Modality.VIDEO, (steps, 2 * rows, 2 * columns), seconds)


def prompt(*parts: int | ItemPlan) -> tuple[np.ndarray, list[tuple[int, ItemPlan]]]:
    """Ids and spans of a prompt; a number stands for that much text."""
    ids, spans = [], []
    for part in parts:
        if isinstance(part, int):
            ids += [TEXT] * part
        else:
            spans.append((len(ids), part))
            ids += part.span_ids.tolist()
    return np.array(ids, np.int32), spans


def reference(ids: np.ndarray, spans, tokens_per_second: float | None) -> tuple[np.ndarray, int]:
    """transformers' function, with just the attributes of a model that it reads."""
    grids = {m: [s.grid for _, s in spans if s.modality is m] for m in (Modality.IMAGE, Modality.VIDEO)}
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=tokens_per_second)
    model_class = Qwen2VLModel if tokens_per_second is None else Qwen2_5_VLModel
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = model_class.get_vision_position_ids.__get__(model)
    given = {
        "mm_token_type_ids": torch.tensor((ids == 7) + 2 * (ids == 8))[None],
        "image_grid_thw": torch.tensor(grids[Modality.IMAGE]) if grids[Modality.IMAGE] else None,
        "video_grid_thw": torch.tensor(grids[Modality.VIDEO]) if grids[Modality.VIDEO] else None,
    }
    if tokens_per_second is not None:
        seconds = [s.seconds_per_step for _, s in spans if s.modality is Modality.VIDEO]
        given["second_per_grid_ts"] = torch.tensor(seconds) if seconds else None
    positions, delta = model_class.get_rope_index(model, torch.tensor(ids)[None].long(), **given)
    return positions[:, 0].numpy(), int(delta)


_ITEMS = st.one_of(
    st.builds(image, st.integers(1, 6), st.integers(1, 6)),
    st.builds(clip, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.floats(0.01, 4.0)),
)


@pytest.mark.parametrize("tokens_per_second", [None, 2, 4], ids=["by step", "2 a second", "4 a second"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_mixtures(tokens_per_second, data):
    """transformers tells items apart by the text between them, so there is some; ours know their spans."""
    if tokens_per_second is not None and not FLOORS_PRODUCT:
        pytest.skip("transformers before 5.24 cut seconds to whole numbers first")
    items = data.draw(st.lists(_ITEMS, max_size=4))
    parts = [data.draw(st.integers(0, 5))]
    for item in items:
        parts += [item, data.draw(st.integers(1, 5))]
    ids, spans = prompt(*parts)
    if not len(ids):
        return
    positions, delta = mrope_positions(len(ids), spans, 2, tokens_per_second)
    expected, expected_delta = reference(ids, spans, tokens_per_second)
    np.testing.assert_array_equal(positions, expected)
    assert (positions.dtype, delta) == (np.int32, expected_delta)


def test_one_image():
    ids, spans = prompt(4, image(2, 3), 3)
    positions, delta = mrope_positions(len(ids), spans, 2, None)
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9],
        [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9],
        [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9],
    ]
    assert delta == -3


def test_second_image_right_behind_the_text():
    ids, spans = prompt(4, image(2, 3), 3, image(5, 2), 2)
    positions, delta = mrope_positions(len(ids), spans, 2, None)
    start = spans[1][0]
    assert positions[:, start].tolist() == [10, 10, 10]
    assert positions[:, start + 10].tolist() == [15, 15, 15]
    assert delta == -8


def test_images_that_touch():
    ids, spans = prompt(image(1, 2), image(2, 1), 1)
    positions, delta = mrope_positions(len(ids), spans, 2, None)
    assert positions.tolist() == [[0, 0, 2, 2, 4], [0, 0, 2, 3, 4], [0, 1, 2, 2, 4]]
    assert delta == 0


def test_time_of_a_clip_may_pass_the_text_behind_it(tmp_path):
    ids, spans = prompt(3, clip(4, 2, 3, 1.0), 3)
    positions, delta = processor(tmp_path, QWEN25).positions(ids, spans)
    assert positions[0].tolist() == [0, 1, 2] + [3] * 6 + [5] * 6 + [7] * 6 + [9] * 6 + [6, 7, 8]
    assert delta == -20
    plain, _ = processor(tmp_path, Config()).positions(ids, spans)
    assert plain[0, 3:27:6].tolist() == [3, 4, 5, 6]


def test_fractions_of_a_second_are_floored_after_the_product():
    _, spans = prompt(0, clip(4, 1, 1, 2 / 3))
    positions, _ = mrope_positions(4, spans, 2, 1)
    assert positions[0].tolist() == [0, 0, 1, 2]
    positions, _ = mrope_positions(4, spans, 2, 2)
    assert positions[0].tolist() == [0, 1, 2, 4]


def test_text_alone():
    positions, delta = mrope_positions(3, [], 2, None)
    assert positions.tolist() == [[0, 1, 2]] * 3
    assert delta == 0
    assert mrope_positions(0, [], 2, None)[1] == 0
