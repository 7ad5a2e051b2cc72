# SPDX-License-Identifier: Apache-2.0
"""Both sides of the comparisons of families with a Pixtral tower, from the formats' definitions."""

from __future__ import annotations

import numpy as np
import torch
from tiny_families.mistral import MERGE, PATCH

from mmjax.models.vision_inputs import VisionInputs

FAMILIES = ("mistral3", "pixtral")
TOWERS = (*FAMILIES, "lighton_ocr")

# (height, width) in pixels: no multiples of a block, one block, a strip, larger than the longest edge of 196.
PICTURES = ((84, 140), (27, 29), (16, 180), (250, 130))


def pictures(sizes=PICTURES) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8) for i, size in enumerate(sizes)]


def reference_inputs(checkpoint, text: str, images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """What transformers' own processor makes of a prompt with one [IMG] a picture."""
    text = text.replace("[IMG]", checkpoint.processor.image_token)
    media = {"images": [images]} if images else {}
    return dict(checkpoint.processor(text=[text], return_tensors="pt", add_special_tokens=False, **media))


def reference_rows(model, inputs) -> list[np.ndarray]:
    """transformers' rows of each picture."""
    with torch.no_grad():
        output = model.model.get_image_features(
            pixel_values=inputs["pixel_values"].to(model.dtype), image_sizes=inputs["image_sizes"]
        )
    return [rows.float().numpy() for rows in output.pooler_output]


def cut(family: str, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[P, values]: patches of a picture in planes [3, >= height, >= width], block by block, one slice each."""
    side = PATCH[family]
    grid = (int(length) // side for length in size)
    corners = [(y * side, x * side) for y, x in order(*grid, MERGE[family])]
    return np.stack([pixels[:, y : y + side, x : x + side].reshape(-1) for y, x in corners])


def order(height: int, width: int, merge: int) -> list[tuple[int, int]]:
    """(row, column) of the patches of a grid in merge-block order, then of those that are in no whole block."""
    blocks = [
        (by + y, bx + x)
        for by in range(0, height - height % merge, merge)
        for bx in range(0, width - width % merge, merge)
        for y in range(merge)
        for x in range(merge)
    ]
    return blocks + sorted({(y, x) for y in range(height) for x in range(width)} - set(blocks))


def pack(family: str, inputs, table: np.ndarray, *, extra: int = 0, garbage: int = 0) -> VisionInputs:
    """Packed inputs of what transformers' processor made, with `extra` padded patches and one empty segment."""
    patch, merge = PATCH[family], MERGE[family]
    patches, positions, lengths, rows = [], [], [], []
    for pixels, size in zip(inputs["pixel_values"].numpy(), inputs["image_sizes"].tolist(), strict=True):
        height, width = size[0] // patch, size[1] // patch
        rows += [sum(lengths) // merge**2 + i for i in range(height // merge * (width // merge))]
        lengths.append(height * width)
        padding = -lengths[-1] % merge**2  # in a segment of its own
        lengths += [padding] * (padding > 0)
        patches.append(np.pad(as_bytes(cut(family, pixels, size), table), ((0, padding), (0, 0))))
        positions += order(height, width, merge) + [(0, 0)] * padding
    offsets = np.cumsum([0, *lengths])
    return VisionInputs(
        patches=np.pad(np.concatenate(patches), ((0, extra), (0, 0)), constant_values=garbage),
        num_patches=np.int32(offsets[-1]),
        positions=np.pad(np.array(positions, np.int32), ((0, extra), (0, 0))),
        cu_seqlens=np.append(offsets, offsets[-1]).astype(np.int32),
        window_seqlens=np.zeros(1, np.int32),
        row_order=np.array(rows if family == "lighton_ocr" else [], np.int32),
    )


def as_bytes(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The bytes behind normalised patches [P, values]; every value must be in the table exactly."""
    planes = values.reshape(len(values), 3, -1)
    found = np.stack([np.searchsorted(table[c], planes[:, c]) for c in range(3)], axis=1).clip(0, 255)
    np.testing.assert_array_equal(np.take_along_axis(table[None], found, 2), planes)
    return found.reshape(len(values), -1).astype(np.uint8)
