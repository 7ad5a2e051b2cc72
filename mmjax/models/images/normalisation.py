# SPDX-License-Identifier: Apache-2.0
"""From bytes to the values a tower sees: a table of 256 entries a channel, exact by construction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from mmjax.models.images.settings_file import SettingsFile

CHANNELS = 3
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Normalisation:
    """What happens to a byte before the tower sees it."""

    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_file(cls, file: SettingsFile) -> Normalisation:
        """As a processor's file says, CLIP's by default. Raises CheckpointError, naming file and key."""
        std = file.channels("image_std", _CLIP_STD)
        if 0 in std:
            raise file.error("image_std", f"must not hold zeros, got {list(std)}")
        return cls(
            do_rescale=file.flag("do_rescale", True),
            rescale_factor=float(file.number("rescale_factor", 1 / 255)),
            do_normalize=file.flag("do_normalize", True),
            mean=file.channels("image_mean", _CLIP_MEAN),
            std=std,
        )


def byte_table(normalisation: Normalisation) -> Float32[np.ndarray, "3 256"]:
    """Normalised value of every byte in every channel, in the arithmetic of transformers' torchvision processors.

    Rescaling is fused into mean and standard deviation, in float32: (x - mean / factor) / (std / factor).
    """
    values = np.broadcast_to(np.arange(256, dtype=np.float32), (CHANNELS, 256))
    if normalisation.do_normalize:
        scale = np.float32(1.0 / normalisation.rescale_factor if normalisation.do_rescale else 1.0)
        mean = np.array(normalisation.mean, np.float32)[:, None] * scale
        std = np.array(normalisation.std, np.float32)[:, None] * scale
        return (values - mean) / std
    return values * np.float32(normalisation.rescale_factor if normalisation.do_rescale else 1.0)
