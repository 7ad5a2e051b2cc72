# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies of the DeepSeek-V4 decoder: constants, made on the host."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float32

from mmjax.models.deepseek_v4_1.text_config import Rope
from mmjax.models.rotary import inverse_frequencies


def rope_frequencies(dim: int, rope: Rope) -> Float32[np.ndarray, "pairs"]:
    """Radians per position of each of dim / 2 pairs.

    With a factor, as YaRN does it: pairs that turn often within the original length keep their frequency, those that
    turn seldom are slowed by the factor, and between lies a ramp. In float32, as transformers computes it.
    """
    fast = inverse_frequencies(dim, rope.theta)
    if rope.factor is None:
        return fast
    slow = np.float32(1.0) / (np.float32(rope.factor) * (np.float32(1.0) / fast))
    low = max(math.floor(_pair_of(rope.beta_fast, dim, rope)), 0)
    high = min(math.ceil(_pair_of(rope.beta_slow, dim, rope)), dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    return slow * (1 - kept) + fast * kept


def _pair_of(turns: float, dim: int, rope: Rope) -> float:
    """The pair, as a fraction of pairs, that turns so often within the original length."""
    return dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
