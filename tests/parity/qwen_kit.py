# SPDX-License-Identifier: Apache-2.0
"""Cases and packing of the Qwen parity tests, from the formats' definitions and not through mmjax's own host code."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from packaging.version import Version

from conversion.loader import load_params
from kernels_pallas.dispatch import VisionOps, reference_attention, reference_vision_ops
from mmjax.models.qwen3_vl.vision_inputs import Qwen3VLVisionInputs
from mmjax.models.registry import family_for
from mmjax.models.steps import embed_tokens
from mmjax.models.vision_inputs import VisionInputs

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
REFERENCE_OPS = reference_vision_ops()

# Frames a second of the clips. transformers before 5.24 cuts the seconds of a temporal step to whole ones, which only
# differs where they are not whole: two frames at 3 a second.
FPS = 3.0 if Version(transformers.__version__) >= Version("5.24") else 2.0


@dataclass(frozen=True)
class Case:
    """A prompt and its media: (height, width) of each image, (frames, height, width) of each clip."""

    text: str
    images: tuple[tuple[int, int], ...] = ()
    videos: tuple[tuple[int, int, int], ...] = ()


CASES = {
    "text": Case("<|im_start|>user\nHow old is the moon?<|im_end|>\n"),
    "image": Case(
        f"<|im_start|>user\n{IMAGE}Describe.<|im_end|>\n", images=((84, 140),)
    ),  # 3 x 5 blocks of 2 x 2 windows
    "images": Case(f"{IMAGE} and {IMAGE}, or {IMAGE}?", images=((56, 112), (140, 84), (28, 196))),
    "mixed": Case(f"{IMAGE} before {VIDEO} after", images=((84, 84),), videos=((4, 56, 84),)),
}


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def reference_inputs(checkpoint, case: Case) -> dict[str, torch.Tensor]:
    """What transformers' own processor makes of a case; clips are sampled where it does so by itself."""
    media = {}
    if case.images:
        media["images"] = [noise((*size, 3), i) for i, size in enumerate(case.images)]
    if case.videos:
        media["videos"] = [noise((*size, 3), 50 + i) for i, size in enumerate(case.videos)]
        media["video_metadata"] = [
            [
                {
                    "total_num_frames": n,
                    "fps": FPS,
                    "frames_indices": list(range(n)),
                    "width": w,
                    "height": h,
                    "duration": n / 3,
                }
            ]
            for n, h, w in case.videos
        ]
    return dict(checkpoint.processor(text=[case.text], return_tensors="pt", **media))


class Ours:
    """Our side of a checkpoint: parameters through the converter, functions of the family."""

    def __init__(self, checkpoint, dtype: str = "float32"):
        hf = json.loads((checkpoint.path / "config.json").read_text())
        self.family = family_for(hf["model_type"])
        self.cfg = replace(self.family.config(hf), dtype=dtype)
        self.params = load_params(checkpoint.path, self.family, self.cfg, progress=False)
        image = checkpoint.processor.image_processor
        self.table = pixel_table(image.image_mean, image.image_std)
        self._encode = jax.jit(self.family.encode, static_argnums=(1, 4))

    def rows(self, packed: VisionInputs, ops: VisionOps = REFERENCE_OPS) -> np.ndarray:
        return np.asarray(self._encode(self.params["vision"], self.cfg, packed, self.table, ops), np.float32)

    def layers_and_logits(self, layer_outputs, ids, row_index, pool, positions) -> tuple[list[np.ndarray], np.ndarray]:
        """Hidden states around every layer, then logits of every position; `row_index` names pool rows."""

        @jax.jit
        def run(text, ids, pool, row_index, positions):
            hidden, deepstack, tokens = embed_tokens(self.family, self.cfg, text, pool, ids, row_index)
            kv = ((),) * self.cfg.num_layers
            step = (hidden, positions, kv, None, reference_attention(), deepstack, tokens)
            around, _ = layer_outputs(text, self.cfg, *step)
            final, _ = self.family.forward(text, self.cfg, *step)
            return around, self.family.logits(text, self.cfg, final)

        pool = jnp.asarray(pool, self.cfg.dtype)
        around, logits = run(self.params["text"], ids, pool, row_index, positions)
        return [np.asarray(x, np.float32) for x in around], np.asarray(logits)


@lru_cache
def ours(checkpoint, dtype: str = "float32") -> Ours:
    """One `Ours` a checkpoint and dtype, so that tests share compiled towers."""
    return Ours(checkpoint, dtype)


def pixel_table(mean, std) -> np.ndarray:
    """[3, 256] float32: transformers fuses rescaling into the normalisation, (x - 255 mean) / (255 std) in float32."""
    scale = torch.tensor(1.0 / 0.00392156862745098)
    values = torch.arange(256, dtype=torch.float32)[None].repeat(3, 1)
    return ((values - (torch.tensor(mean) * scale)[:, None]) / (torch.tensor(std) * scale)[:, None]).numpy()


def as_bytes(pixel_values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The uint8 patches behind normalised ones; every value must be in the table exactly."""
    patches = pixel_values.reshape(len(pixel_values), 3, -1)
    found = np.stack([np.searchsorted(table[c], patches[:, c]) for c in range(3)], axis=1).clip(0, 255)
    assert np.array_equal(np.take_along_axis(table[None], found.reshape(len(patches), 3, -1), 2), patches)
    return found.reshape(len(patches), -1).astype(np.uint8)


def table_taps(height: int, width: int, merge: int, side: int) -> tuple[list[list[int]], list[list[float]]]:
    """Entries of a square table around each patch of a frame, and their shares: corners lie on corners."""
    index, weight = [], []
    for row, column in frame_order(height, width, merge):
        y, x = (at * (side - 1) / max(size - 1, 1) for at, size in ((row, height), (column, width)))
        up, left = int(y), int(x)
        corners = [(up, left), (up, left + 1), (up + 1, left), (up + 1, left + 1)]
        index.append([min(i, side - 1) * side + min(j, side - 1) for i, j in corners])
        weight.append([(1 - abs(y - i)) * (1 - abs(x - j)) for i, j in corners])
    return index, weight


def frame_order(height: int, width: int, merge: int) -> list[tuple[int, int]]:
    """Row and column of every patch of a frame, merge block by merge block."""
    return [
        (by * merge + y, bx * merge + x)
        for by in range(height // merge)
        for bx in range(width // merge)
        for y in range(merge)
        for x in range(merge)
    ]


def pack(
    patches: np.ndarray, grids: list[tuple[int, int, int]], cfg, *, extra: int = 0, garbage: int = 0
) -> VisionInputs:
    """Packed inputs of `grids`, with `extra` padded patches filled with byte `garbage`, an empty segment and window."""
    merge = cfg.vision.merge
    positions, lengths, windows = [], [], []
    taps: tuple[list, list] = ([], [])
    side = int(cfg.window_capacity**0.5) // merge
    for t, h, w in grids:
        order = frame_order(h, w, merge)
        for _ in range(t):
            if hasattr(cfg.vision, "table_side"):
                for mine, frames in zip(taps, table_taps(h, w, merge, cfg.vision.table_side), strict=True):
                    mine += frames
            start = sum(lengths)
            lengths.append(h * w)
            positions += order
            if side:
                members: dict[tuple[int, int], list[int]] = {}
                for i, (row, column) in enumerate(order):
                    members.setdefault((row // merge // side, column // merge // side), []).append(start + i)
                windows += [ids for _, ids in sorted(members.items())]
    order = np.concatenate(windows) if side else np.arange(len(patches))
    rows = np.append(np.argsort(order[:: merge**2]), np.arange(extra // merge**2))  # padded ones repeat some
    offsets, starts = np.cumsum([0, *lengths, 0]), np.cumsum([0, *map(len, windows), 0])
    inputs = VisionInputs(
        patches=np.pad(patches[order], ((0, extra), (0, 0)), constant_values=garbage),
        num_patches=np.int32(len(patches)),
        positions=np.pad(np.array(positions, np.int32)[order], ((0, extra), (0, 0))),
        cu_seqlens=offsets.astype(np.int32),
        window_seqlens=(starts if side else starts[:1]).astype(np.int32),
        row_order=(rows if side else rows[:0]).astype(np.int32),
    )
    if not hasattr(cfg.vision, "table_side"):
        return inputs
    index, weight = (np.pad(np.array(mine), ((0, extra), (0, 0))) for mine in taps)
    return Qwen3VLVisionInputs(
        **vars(inputs), table_index=index.astype(np.int32), table_weight=weight.astype(np.float32)
    )


def media_of(inputs: dict[str, torch.Tensor], table: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Patches and grids of all images, then all clips."""
    pixels = [inputs[key].numpy() for key in ("pixel_values", "pixel_values_videos") if key in inputs]
    grids = [tuple(g) for key in ("image_grid_thw", "video_grid_thw") if key in inputs for g in inputs[key].tolist()]
    return as_bytes(np.concatenate(pixels), table), grids
