# SPDX-License-Identifier: Apache-2.0
"""Claim: executables are kept in the user's own cache folder, and a folder that can't be made stops nobody."""

from __future__ import annotations

import stat

import jax
import pytest

from mmjax.compilation import use_persistent_cache


@pytest.fixture
def told_nothing(monkeypatch, tmp_path):
    """jax without a cache folder; what it is told in a test is forgotten afterwards."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_folder_of_the_users_own(told_nothing):
    use_persistent_cache()
    folder = told_nothing / "mmjax" / f"jax-{jax.__version__}"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_jax_was_told_stays(told_nothing, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    use_persistent_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not told_nothing.exists()


def test_a_folder_that_can_not_be_made(told_nothing, caplog):
    told_nothing.write_text("a file in its place")
    use_persistent_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert "can't be kept" in caplog.text
