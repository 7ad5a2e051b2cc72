# SPDX-License-Identifier: Apache-2.0
"""The small model that ships with the package, and the scenes it understands."""

from __future__ import annotations

from pathlib import Path

from mmjax.demo.showcase import DemoScene, demo_clip, demo_pair, demo_scene

__all__ = ["DemoScene", "checkpoint_path", "demo_clip", "demo_pair", "demo_scene"]


def checkpoint_path() -> Path:
    """The Hugging Face directory of the demo model."""
    return Path(__file__).parent / "checkpoint"
