# SPDX-License-Identifier: Apache-2.0
"""Claim: equal digests mean equal values. Shapes, types, order and nesting can't be confused with each other."""

from __future__ import annotations

import itertools
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmjax.inputs.hashing import ImageData, canonical_bytes, item_digest, mm_processor_kwargs_hash


def distinct(values) -> bool:
    digests = [item_digest(value) for value in values]
    return len(set(digests)) == len(digests)


def palette_image(colour: tuple[int, int, int]) -> Image.Image:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([*colour, *[0] * 765])
    return image


def test_shapes_of_equal_volume_differ():
    zeros = np.zeros(30 * 150 * 3, np.uint8)
    shapes = [(30, 150, 3), (150, 30, 3), (90, 150), (150, 90), (13500,), (1, 13500), (30, 450)]
    assert distinct([zeros.reshape(shape) for shape in shapes])
    assert distinct([ImageData(zeros.reshape(30, 150, 3)), ImageData(zeros.reshape(150, 30, 3))])


def test_types_over_one_buffer_differ():
    buffer = np.arange(8, dtype=np.uint8)
    types = [np.uint8, np.int8, np.float16, np.int16, np.uint16, ml_dtypes.bfloat16, np.float32, np.int32]
    assert distinct([buffer.view(kind) for kind in types])
    assert distinct([buffer.view(ml_dtypes.float8_e4m3fn), buffer.view(ml_dtypes.float8_e5m2), buffer])


def test_palettes_and_modes_differ():
    assert distinct([palette_image((255, 0, 0)), palette_image((0, 0, 255))])
    grey = Image.new("L", (4, 4), 7)
    assert distinct([grey, grey.convert("RGB"), grey.convert("RGBA"), grey.convert("LA"), np.asarray(grey)])


def test_layout_in_memory_does_not_count():
    values = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    same = [
        values,
        np.asfortranarray(values),
        np.repeat(values, 2, axis=2)[:, :, ::2],
        values[::-1][::-1],
        values.astype(">i4"),
    ]
    assert len({item_digest(value) for value in same}) == 1


def test_tensors_hash_like_arrays():
    torch = pytest.importorskip("torch", reason="needs torch, a test extra")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert item_digest(torch.from_numpy(values)) == item_digest(values)
    with pytest.raises(ValueError, match="as an array"):
        item_digest(torch.zeros(2, dtype=torch.bfloat16))


def test_zero_sizes_and_no_axes():
    assert distinct([np.zeros(0), np.zeros((0, 3)), np.zeros((3, 0)), np.float32(0), np.zeros(()), np.zeros(1)])


@pytest.mark.parametrize(
    "values",
    [
        [["ab", "c"], ["a", "bc"], ["abc"], "abc"],
        ["1", 1, 1.0, True, b"1", None, []],
        [{"a": 1}, {"a": 1, "b": None}, {"a": 1, "b": {}}, [["a", 1]]],
        [[1, [2, 3]], [[1, 2], 3], [1, 2, 3]],
        [0.0, -0.0, 0, False, ""],
    ],
)
def test_neighbours_differ(values):
    assert distinct(values)


def test_order_counts_in_lists_alone():
    assert mm_processor_kwargs_hash({"a": 1, "b": 2}) == mm_processor_kwargs_hash({"b": 2, "a": 1})
    assert distinct([[1, 2], [2, 1]])


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 1j, {"a": object()}, {1: 0, "a": 0}, np.array([object()]), np.zeros(2, [("x", "i4")])],
)
def test_values_without_a_form_are_refused(value):
    with pytest.raises(ValueError, match=r"form|sortable"):
        canonical_bytes(value)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
)
arrays = st.builds(
    lambda kind, shape, fill: np.full(shape, fill, kind),
    st.sampled_from(["uint8", "int8", "int16", "float32"]),
    st.sampled_from([(2,), (1, 2), (2, 1), (), (0,)]),
    st.integers(0, 2),
)
values = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def identity(value):
    """What a value is, with Python's cross-type equalities (1 == 1.0 == True) taken apart."""
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, list):
        return "list", tuple(identity(entry) for entry in value)
    if isinstance(value, dict):
        return "dict", tuple((key, identity(value[key])) for key in sorted(value))
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    return type(value).__name__, value


@given(values, values)
def test_equal_forms_mean_equal_values(one, other):
    assert (canonical_bytes(one) == canonical_bytes(other)) == (identity(one) == identity(other))


@given(st.lists(values, min_size=2, max_size=6, unique_by=identity))
def test_no_form_begins_another(different):
    """Forms are prefix-free, so forms that follow each other can be cut in one way only."""
    for one, other in itertools.permutations(map(canonical_bytes, different), 2):
        assert not other.startswith(one)
