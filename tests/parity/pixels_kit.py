# SPDX-License-Identifier: Apache-2.0
"""Both sides of the pixel comparisons: our processor and transformers' torchvision one, under equal settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmjax.inputs.items import Modality, ProcessedItem, VideoMetadata
from mmjax.models.qwen_shared.processing import QwenProcessor

IDS = {Modality.IMAGE: 7, Modality.VIDEO: 8}


@dataclass(frozen=True)
class Vision:
    """The part of a config that a processor reads."""

    patch_size: int = 14
    merge: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Config:
    vision: Vision = Vision()
    window_capacity: int = 0
    image_token_id: int = 7
    video_token_id: int = 8
    never_sampled: tuple[int, ...] = (7, 8, 5, 6)


QWEN25 = Config(Vision(tokens_per_second=2.0), window_capacity=64)


def processor(folder: Path, cfg: Config = Config(), **files: dict) -> QwenProcessor:
    """Our processor for a checkpoint with these files (`preprocessor_config={...}`); class defaults without any."""
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return QwenProcessor.from_checkpoint(cfg, folder)


def pixel_values(ours: QwenProcessor, item: ProcessedItem) -> np.ndarray:
    """float32 [P, values]: what the tower computes from bytes and table."""
    bytes_ = item.patches.reshape(len(item.patches), 3, -1)
    table = ours.pixel_table()
    return np.stack([table[channel][bytes_[:, channel]] for channel in range(3)], 1).reshape(len(bytes_), -1)


def assert_image_parity(ours: QwenProcessor, theirs, picture: Image.Image, rgb: np.ndarray, **options) -> None:
    """`theirs` sees `picture`, we see `rgb`; grids and values must be equal."""
    expected = theirs(images=picture, return_tensors="np", **options)
    item = ours.image(rgb, options)
    assert item.plan.grid == tuple(expected["image_grid_thw"][0])
    assert item.plan.encoder_tokens == len(item.patches) == len(expected["pixel_values"])
    assert item.plan.rows * 4 == len(item.patches)
    assert np.abs(pixel_values(ours, item) - expected["pixel_values"]).max() == 0.0


def assert_video_parity(
    ours: QwenProcessor, theirs, frames: np.ndarray, source_fps: float | None, **options
) -> ProcessedItem:
    """The same clip through both; returns our item."""
    total = len(frames)
    metadata = {"total_num_frames": total, "fps": source_fps, "frames_indices": list(range(total))}
    expected = theirs(videos=[frames], video_metadata=[metadata], return_tensors="np", return_metadata=True, **options)
    item = ours.video(frames, VideoMetadata(total, source_fps, tuple(range(total))), options)
    assert item.plan.grid == tuple(expected["video_grid_thw"][0])
    assert np.abs(pixel_values(ours, item) - expected["pixel_values_videos"]).max() == 0.0
    step = ours.geometry.temporal / expected["video_metadata"][0].sampled_fps
    assert item.plan.seconds_per_step == pytest.approx(step, abs=0)
    return item


def noise(seed: int, *shape: int) -> np.ndarray:
    """uint8 noise; a third of it is black or white, so that cubic overshoot is clipped somewhere."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-128, 384, shape)
    return np.clip(values, 0, 255).astype(np.uint8)
