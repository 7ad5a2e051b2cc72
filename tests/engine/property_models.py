# SPDX-License-Identifier: Apache-2.0
"""Which models the whole-engine property test plays with. A family takes part by one line here."""

from __future__ import annotations

from typing import NamedTuple


class PropertyModel(NamedTuple):
    """Page sizes of its machines, and its share of the requests."""

    pages: tuple[int, ...]
    share: float


# Tiny random models by family, and the demo model, whose answers hang on its pictures: it takes ten times as long.
# The last one is still there for the episodes of test_property_found.py.
MODELS = {
    "qwen2_vl": PropertyModel((8,), 0.3),
    "demo": PropertyModel((16,), 0.1),
    "deepseek_v4_1": PropertyModel((4,), 0.04),
    "hyperclovax": PropertyModel((16,), 0.075),
    "lighton_ocr": PropertyModel((8,), 0.04),
    "mistral3": PropertyModel((8,), 0.06),
    "pixtral": PropertyModel((16,), 0.06),
    "qwen3_vl": PropertyModel((8,), 0.075),
    "qwen3_vl_moe": PropertyModel((16,), 0.05),
    "qwen2_5_vl": PropertyModel((4, 16), 0.6),
}
