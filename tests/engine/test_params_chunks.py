# SPDX-License-Identifier: Apache-2.0
"""Claim: a chunk of a prompt uses exactly the rows between its ends, whatever was computed before."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.inputs.chunks import check_mm_embed_cumsum_if_needed, find_input_mm_embeds
from mmjax.inputs.masks import mm_embed_cumsum
from mmjax.inputs.params import MultimodalParams
from mmjax.inputs.runtime import MultimodalRuntimeData


def runtime_of(mask, past: int, end: int) -> MultimodalRuntimeData:
    return MultimodalRuntimeData(past, end, mm_embed_cumsum(np.asarray(mask, bool)))


def counts(runtime: MultimodalRuntimeData) -> tuple[int, int, int]:
    return runtime.num_cached_mm_tokens, runtime.num_mm_tokens_in_chunk, runtime.total_embeds_in_request


@pytest.mark.parametrize(
    ("mask", "past", "end", "expected"),
    [
        ("TTTTT", 0, 5, (0, 5, 5)),
        ("TTFTTFT", 0, 4, (0, 3, 5)),
        ("TTFTTFT", 3, 7, (2, 3, 5)),
        ("FTTFTTTF", 0, 5, (0, 3, 5)),
        ("FTTFTTTF", 5, 8, (3, 2, 5)),
    ],
)
def test_rows_of_a_chunk(mask, past, end, expected):
    assert counts(runtime_of([letter == "T" for letter in mask], past, end)) == expected


def test_gaps_between_runs_take_no_rows():
    mask = np.zeros(1420, bool)
    for start in (37, 319, 601, 883, 1165):
        mask[start : start + 254] = True
    assert counts(runtime_of(mask, 256, 512)) == (219, 228, 1270)
    contiguous = np.zeros(1420, bool)
    contiguous[37 : 37 + 1270] = True
    assert runtime_of(contiguous, 256, 512).num_mm_tokens_in_chunk == 256


def test_runtime_needs_its_cumsum():
    with pytest.raises(TypeError):
        MultimodalRuntimeData(0, 1)
    with pytest.raises(TypeError, match="numpy"):
        MultimodalRuntimeData(0, 1, [1])
    with pytest.raises(ValueError, match="empty"):
        MultimodalRuntimeData(0, 0, np.array([], np.int64))


@pytest.mark.parametrize(("past", "end"), [(-1, 2), (3, 2), (0, 6), (6, 6)])
def test_a_chunk_lies_inside_its_prompt(past, end):
    with pytest.raises(ValueError, match="outside a prompt of 5"):
        runtime_of([True] * 5, past, end)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_chunks_use_every_row_once(mask, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(mask)), max_size=6)) | {0, len(mask)})
    used = []
    for past, end in pairwise(cuts):
        cached, now, total = counts(runtime_of(mask, past, end))
        used += range(cached, cached + now)
        assert now == sum(mask[past:end])
    assert used == list(range(total))


def test_a_part_of_a_prompt_with_media_needs_row_counts():
    cumsum = np.array([0, 1, 2])
    check_mm_embed_cumsum_if_needed({}, 1, 2, 3)
    check_mm_embed_cumsum_if_needed({"image": {}}, 0, 3, 3)
    check_mm_embed_cumsum_if_needed({"image": {}, "multimodal_embed_mask_cumsum": cumsum}, 1, 2, 3)
    with pytest.raises(ValueError, match="no multimodal_embed_mask_cumsum"):
        check_mm_embed_cumsum_if_needed({"image": {}}, 0, 2, 3)
    with pytest.raises(ValueError, match="outside a prompt of 3"):
        check_mm_embed_cumsum_if_needed({}, 2, 4, 3)


def params_of(cached: int, chunk: int, total: int) -> MultimodalParams:
    """A request of `total` rows and nothing else, of which `cached` are done and `chunk` are due."""
    return MultimodalParams(multimodal_runtime=runtime_of([True] * total, cached, cached + chunk))


def rows_of(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)[:, None] * np.ones(2, np.float32)


def joined_of(*ranges: tuple[int, int]) -> list[float]:
    return [float(row) for first, last in ranges for row in range(first, last)]


SLICED = [
    (33, [(4, 6, 10), (7, 6, 13), (3, 7, 10)], [(4, 10), (17, 23), (26, 33)]),
    (25, [(8, 0, 8), (3, 6, 9), (8, 0, 8)], [(11, 17)]),
    (25, [(5, 3, 8), (2, 7, 9), (6, 2, 8)], [(5, 8), (10, 17), (23, 25)]),
    (20, [(0, 20, 20)], [(0, 20)]),
    (20, [(5, 15, 20)], [(5, 20)]),
    (30, [(5, 5, 10), (10, 0, 20)], [(5, 10)]),
]


@pytest.mark.parametrize(("total", "requests", "expected"), SLICED)
def test_rows_of_a_joined_array(total, requests, expected):
    (out,) = find_input_mm_embeds([rows_of(total)], [params_of(*request) for request in requests])
    assert out[:, 0].tolist() == joined_of(*expected)


def test_rows_of_separate_arrays():
    arrays = [rows_of(10), rows_of(15), rows_of(8)]
    out = find_input_mm_embeds(arrays, [params_of(3, 7, 10), params_of(8, 7, 15), params_of(0, 8, 8)])
    assert [part[:, 0].tolist() for part in out] == [joined_of((3, 10)), joined_of((8, 15)), joined_of((0, 8))]
    arrays = [rows_of(20), rows_of(15), rows_of(20)]
    out = find_input_mm_embeds(arrays, [params_of(10, 10, 20), params_of(0, 15, 15), params_of(20, 0, 20)])
    assert [part[:, 0].tolist() for part in out] == [joined_of((10, 20)), joined_of((0, 15)), []]


def test_no_rows_due_gives_nothing():
    assert find_input_mm_embeds([rows_of(18)], [params_of(8, 0, 8), params_of(10, 0, 10)]) == []
    assert find_input_mm_embeds([rows_of(20)], [params_of(20, 0, 20)]) == []


def test_rows_that_already_fit_are_returned_as_they_are():
    whole = rows_of(30)
    out = find_input_mm_embeds([whole], [params_of(0, 12, 12), params_of(0, 18, 18)])
    assert len(out) == 1
    assert out[0] is whole
    assert find_input_mm_embeds([whole], [])[0] is whole
    assert find_input_mm_embeds([whole], [MultimodalParams()])[0] is whole


def test_arrays_must_belong_to_requests():
    with pytest.raises(ValueError, match="2 embedding arrays for 1 requests"):
        find_input_mm_embeds([rows_of(3), rows_of(4)], [params_of(0, 7, 7)])
