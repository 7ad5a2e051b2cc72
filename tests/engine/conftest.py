# SPDX-License-Identifier: Apache-2.0
"""Worlds of the property test of the whole engine, one at a time."""

from __future__ import annotations

import pytest
from property_models import MODELS


@pytest.fixture(scope="session")
def property_world(tiny_checkpoint):
    """A function (name of a model) -> its World; see property_world.py. The world of another model goes first."""
    import jax
    import llm_kit
    import property_world as worlds

    from mmjax.demo import checkpoint_path

    made = {}

    def make(name: str):
        if name not in made:
            for world in made.values():
                world.release()
            made.clear()
            jax.clear_caches()  # what the reference compiled for every length it met
            path = checkpoint_path() if name == "demo" else tiny_checkpoint(name, **llm_kit.CHECKPOINT).path
            fill = worlds.fill_with_scenes if name == "demo" else worlds.fill_with_noise
            made[name] = fill(worlds.build_world(path, MODELS[name].pages))
        return made[name]

    return make
