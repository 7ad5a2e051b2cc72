# SPDX-License-Identifier: Apache-2.0
"""Set-up that every test shares: no network, an importable torchvision, exact float32, tiny checkpoints on demand."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # engines that differ in host limits alone share their executables
    _CACHE = tempfile.TemporaryDirectory(prefix="mmjax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name

import jax
import llm_kit
import pytest
import tiny_families

from conversion.verify.transformers_judge import make_torchvision_importable
from mmjax.errors import ConfigError

with contextlib.suppress(ConfigError):  # without torch, tests against transformers are skipped
    make_torchvision_importable()
# Full float32 matrix products everywhere: accelerators would round the operands, and tests compare to 1e-5.
jax.config.update("jax_default_matmul_precision", "highest")


_MOST_MAPPINGS = 24_000  # a process may have 65,530; past that XLA's compiler crashes


@pytest.fixture(scope="module", autouse=True)
def _bounded_mappings():
    """Lets go of functions that earlier tests compiled before their code fills the process' table of mappings."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption(
        "--record-parity", action="store_true", help="write what parity tests measure to mmjax/models/parity.json"
    )


@pytest.fixture(scope="session")
def parity_record(pytestconfig):
    """What the run measures against transformers, see `parity_record`."""
    record = pytest.importorskip("parity_record", reason="needs torch", exc_type=ImportError).ParityRecord()
    yield record
    if pytestconfig.getoption("--record-parity"):
        record.write()


@pytest.fixture(scope="session")
def tiny_llm(tiny_checkpoint):
    """A function (family) -> LLM over a tiny checkpoint, one for the whole session; see `llm_kit`."""
    made = {}

    def make(family: str = "qwen2_5_vl"):
        if family not in made:
            made[family] = llm_kit.build(tiny_checkpoint(family, **llm_kit.CHECKPOINT).path)
        return made[family]

    yield make
    for llm in made.values():
        llm.close()


@pytest.fixture(scope="session")
def tiny_reference(tiny_checkpoint):
    """A function (family) -> the slow judge over the checkpoint of `tiny_llm`."""
    made = {}

    def make(family: str = "qwen2_5_vl"):
        if family not in made:
            made[family] = llm_kit.build(tiny_checkpoint(family, **llm_kit.CHECKPOINT).path, reference=True)
        return made[family]

    yield make
    for llm in made.values():
        llm.close()


@pytest.fixture
def llm(tiny_llm):
    """The tiny Qwen2.5-VL with a fresh engine: empty caches, no limits; a test may serve with others."""
    with llm_kit.serving(tiny_llm()) as served:
        yield served
        llm_kit.assert_nothing_held(served)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A function (family, **options of `tiny.build`) -> TinyCheckpoint; the same arguments give the same object."""
    pytest.importorskip("tiny", reason="needs torch and transformers, test extras", exc_type=ImportError)
    made = {}

    def make(family: str, **options):
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = tiny_families.build(family, tmp_path_factory.mktemp(family), **options)
        return made[key]

    return make
