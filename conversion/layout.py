# SPDX-License-Identifier: Apache-2.0
"""A family's weight table, worked out: which box of which leaf each checkpoint tensor fills. Serves both directions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mmjax.models.family import Weight


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and its place in a leaf.

    Attributes:
      name: canonical checkpoint name.
      shape: as the checkpoint stores it.
      view: the same values in the leaf's dimensions, before padding.
      box: the index of those values in the leaf; what no box covers is padding and holds zeros.
      transposed: whether `view` and `box` speak of the leaf with its last two axes swapped.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    box: tuple[slice, ...]
    transposed: bool = False

    def of(self, leaf: np.ndarray) -> np.ndarray:
        """The box as a view of `leaf`, with shape `view`."""
        return (leaf.swapaxes(-1, -2) if self.transposed else leaf)[(*self.box, ...)]


@dataclass(frozen=True)
class Leaf:
    """One array of the parameter tree: its dotted path, shape and dtype, and the tensors it is made of."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded(self) -> bool:
        return sum(math.prod(piece.view) for piece in self.pieces) < math.prod(self.shape)


def leaves(weights: Sequence[Weight], spec: dict) -> list[Leaf]:
    """The leaves of `spec` in tree order, each with its pieces.

    Raises:
      ValueError: table and spec disagree, which is a fault of the family and not of a checkpoint.
    """
    table = {weight.path: weight for weight in weights}
    flat, _ = jax.tree_util.tree_flatten_with_path(spec)
    wanted = {dotted(path): leaf for path, leaf in flat}
    if table.keys() != wanted.keys() or len(table) != len(weights):
        raise ValueError(f"weight table and spec name different leaves: {sorted(table.keys() ^ wanted.keys())}")
    result = []
    for path, struct in wanted.items():
        shape, pieces = _lay_out(table[path])
        if shape != tuple(struct.shape):
            raise ValueError(f"{path}: the weight table makes {list(shape)}, the spec says {list(struct.shape)}")
        result.append(Leaf(path, shape, np.dtype(struct.dtype), pieces))
    return result


def dotted(path: Sequence[Any]) -> str:
    """A tree path as the weight tables write it: text.layers.3.qkv."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def _lay_out(weight: Weight) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Shape of a leaf and the boxes of its sources.

    Reshaped, then padded, joined along axis 0, stacked, and transposed in the end.
    """
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[slice, ...]]] = []
    rows, tail = 0, ()
    for source, shape in zip(weight.sources, weight.source_shapes, strict=True):
        view = tuple(weight.shape) if weight.shape is not None else tuple(shape)
        if math.prod(view) != math.prod(shape):
            raise ValueError(f"{weight.path}: {list(shape)} can't be read as {list(view)}")
        size = list(view)
        for axis, length in weight.pad_to:
            if length < view[axis]:
                raise ValueError(f"{weight.path}: axis {axis} of {source} has {view[axis]}, more than {length}")
            size[axis] = length
        start = (slice(rows, rows + view[0]),) if view else ()
        boxes.append((source, tuple(shape), view, start + tuple(slice(0, length) for length in view[1:])))
        rows, tail = rows + (size[0] if size else 0), tuple(size[1:])
    joined = (rows, *tail) if boxes[0][2] else ()
    if weight.stack:
        joined, boxes = (weight.stack, *joined), list(_stacked(boxes, weight.stack))
    if weight.transposed:
        joined = (*joined[:-2], joined[-1], joined[-2])
    return joined, tuple(Piece(*box, weight.transposed) for box in boxes)


def _stacked(boxes: list, count: int) -> Iterator[tuple]:
    for index in range(count):
        for source, shape, view, box in boxes:
            yield source.format(i=index), shape, (1, *view), (slice(index, index + 1), *box)
