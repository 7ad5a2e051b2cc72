# SPDX-License-Identifier: Apache-2.0
"""The fixed input of a verification: one drawn picture and one question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8

# 8 x 11 merged rows of patches of 14 pixels: neither side a multiple of common attention windows.
HEIGHT, WIDTH = 220, 300


@dataclass(frozen=True)
class VerifyPrompt:
    """A picture, RGB, and what is asked about it."""

    image: UInt8[np.ndarray, "H W 3"]
    question: str

    def messages(self, *, with_pixels: bool) -> list[dict[str, Any]]:
        """The conversation as mmjax takes it, or, without the pixels, as transformers' chat templates do."""
        picture = {"type": "image", "image": self.image} if with_pixels else {"type": "image"}
        return [{"role": "user", "content": [picture, {"type": "text", "text": self.question}]}]


def fixed_prompt() -> VerifyPrompt:
    """The same on every machine: colour ramps, a disc, and noise, so that edges, flats and texture all occur."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float64)
    ramps = np.stack([x * (255 / WIDTH), y * (255 / HEIGHT), 255 - x * (255 / WIDTH)], axis=-1)
    noise = np.random.default_rng(0).integers(-20, 21, ramps.shape)
    disc = (y - 90) ** 2 + (x - 180) ** 2 < 60**2
    picture = np.where(disc[..., None], [230, 40, 60], ramps + noise)
    return VerifyPrompt(picture.clip(0, 255).astype(np.uint8), "What is in the picture?")
