# SPDX-License-Identifier: Apache-2.0
"""Tests in this folder need an NVIDIA GPU and are skipped without one."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
