# SPDX-License-Identifier: Apache-2.0
"""Tests here run on an NVIDIA GPU and skip everywhere else."""

from __future__ import annotations

import jax
import pytest


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "tests/gpu/" in str(item.path).replace("\\", "/"):
            item.add_marker(skip)
