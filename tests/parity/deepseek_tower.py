# SPDX-License-Identifier: Apache-2.0
"""The tower of DeepSeek-V4.1 in plain torch, one picture at a time, written from its description and not from ours."""

from __future__ import annotations

import math

import torch
from torch.nn import functional


def picture_rows(tensors: dict[str, torch.Tensor], pixels: torch.Tensor, config: dict) -> torch.Tensor:
    """Embedding rows [R, text width] of one resized picture, uint8 [height, width, 3]."""
    side = config["patch_size"]
    height, width = pixels.shape[0] // side, pixels.shape[1] // side
    values = (pixels.float() / 255 - 0.5) / 0.5
    patches = [
        values[r * side : (r + 1) * side, c * side : (c + 1) * side].permute(2, 0, 1).reshape(-1)
        for r in range(height)
        for c in range(width)
    ]
    x = functional.linear(torch.stack(patches), *_both(tensors, "vision.patch_embed.proj"))
    for i in range(config["num_hidden_layers"]):
        block = f"vision.blocks.{i}"
        x = x + _attention(tensors, block, _norm(x, tensors[f"{block}.norm1.weight"]), height, width, config)
        gate, up = functional.linear(
            _norm(x, tensors[f"{block}.norm2.weight"]), tensors[f"{block}.mlp.w1.weight"]
        ).chunk(2, -1)
        x = x + functional.linear(functional.silu(gate) * up, tensors[f"{block}.mlp.w2.weight"])
    x = _norm(x, tensors["vision.norm.weight"])
    return _assemble(tensors, x.reshape(height, width, -1))


def _both(tensors: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def _attention(tensors, block, x, height, width, config) -> torch.Tensor:
    heads = config["num_attention_heads"]
    q, k, v = functional.linear(x, *_both(tensors, f"{block}.attn.wqkv")).chunk(3, -1)
    dim = q.shape[-1] // heads
    outs = []
    for head in range(heads):
        part = slice(head * dim, (head + 1) * dim)
        a, b = _turn(q[:, part], height, width), _turn(k[:, part], height, width)
        outs.append(torch.softmax(a @ b.T / math.sqrt(dim), -1) @ v[:, part])
    return functional.linear(torch.cat(outs, -1), *_both(tensors, f"{block}.attn.wo"))


def _turn(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Rotary positions: the first half of the angles follows the row, the second the column."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for patch in range(height * width):
        row, column = divmod(patch, width)
        for j in range(half):
            k = j % (half // 2)
            angle = (row if j < half // 2 else column) * 10000.0 ** (-2 * k / half)
            first, second = x[patch, j], x[patch, j + half]
            out[patch, j] = first * math.cos(angle) - second * math.sin(angle)
            out[patch, j + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


def _assemble(tensors: dict[str, torch.Tensor], grid: torch.Tensor) -> torch.Tensor:
    height, width, channels = grid.shape
    rows, columns = -(-height // 3), -(-width // 3)
    padded = functional.pad(grid, (0, 0, 0, columns * 3 - width, 0, rows * 3 - height))
    out = [tensors["image_start"]]
    for row in range(rows):
        for column in range(columns):
            cell = padded[row * 3 : row * 3 + 3, column * 3 : column * 3 + 3]  # [3, 3, channels]
            flat = torch.zeros(9 * channels)
            for i in range(3):
                for j in range(3):
                    flat[torch.arange(channels) * 9 + i * 3 + j] = cell[i, j]
            hidden = functional.gelu(functional.linear(flat, *_both(tensors, "aligner.w1")))
            out.append(functional.linear(hidden, *_both(tensors, "aligner.w2")))
        out.append(tensors["image_newline"])
    return torch.stack([*out, tensors["image_end"]])
