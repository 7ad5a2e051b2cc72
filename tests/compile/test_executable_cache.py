# SPDX-License-Identifier: Apache-2.0
"""Claim: a start that finds its executables on disk neither traces nor lowers, and serves as one that compiled them."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import pickle
import sys
import zlib
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import llm_kit
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from mmjax import fingerprint
from mmjax.compilation import Job, compile_all, shapes_on
from mmjax.executable_cache import ExecutableCache
from mmjax.models.registry import FAMILIES

DEVICE = jax.devices()[0]


def scaled(factor: int, state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return state.at[0].add(x.sum()), factor * x @ x


def job(results: list, *, function=None, size: int = 8, **changes) -> Job:
    """Of a function that jax has not seen, so that nothing in memory spares the work."""
    function, shape = function or partial(scaled, 3), jax.ShapeDtypeStruct
    arguments = shapes_on(DEVICE, (shape((4,), jnp.float32), shape((size, size), jnp.float32)))
    return Job("step", function, arguments, results.append, **{"donate": (0,)} | changes)


def answers(step) -> list[np.ndarray]:
    return [np.asarray(x) for x in step(jnp.zeros(4), np.arange(64, dtype=np.float32).reshape(8, 8))]


def built(cache: ExecutableCache, **changes):
    results = []
    compile_all([job(results, **changes)], device=DEVICE, kept=cache, progress=False)
    return results[0]


@contextmanager
def lowered():
    """The names of the functions that are lowered meanwhile."""
    names = []

    def on_event(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            names.append(details["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)


@contextmanager
def jax_told(**settings):
    """Settings of jax by their names without "jax_", which its own cache heeds when it is asked for the first time."""
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in settings}
    for name, value in settings.items():
        jax.config.update(f"jax_{name}", value)
    reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


@pytest.fixture
def cache(tmp_path):
    """An empty one, and no cache of jax's, which would give executables that CPUs can't write again."""
    with jax_told(enable_compilation_cache=False):
        yield ExecutableCache(tmp_path)


def files(cache: ExecutableCache) -> list:
    return sorted(cache.directory.iterdir())


# ---- a second start -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def starts(tiny_checkpoint, tmp_path_factory):
    """What two starts of a tiny model lowered, answered, and took of memory."""
    path = tiny_checkpoint("qwen2_5_vl", **llm_kit.CHECKPOINT).path
    engine, seen = replace(llm_kit.ENGINE, compilation_cache=True), []
    with jax_told(compilation_cache_dir=str(tmp_path_factory.mktemp("jax")), enable_compilation_cache=False):
        for _ in range(2):
            jax.clear_caches()  # as in another process
            with lowered() as names, llm_kit.build(path, engine=engine) as llm:
                machine = llm.running.machine
                steps = {**machine.text.executables(), **machine.encoder.executables()}
                alias = {name: step.memory_analysis().alias_size_in_bytes for name, step in steps.items()}
                temp = {name: step.memory_analysis().temp_size_in_bytes for name, step in steps.items()}
                answer = llm.chat(llm_kit.user(llm_kit.noise(60, 60), "what?"), llm_kit.GREEDY)
                seen.append((list(names), answer.token_ids, alias, temp, llm.stats().compiles))
    return seen


def test_a_second_start_lowers_nothing_but_what_makes_empty_arrays(starts):
    (first, *_), (second, *_) = starts
    assert {"jit(prefill_step)", "jit(decode_step)", "jit(sample_step)", "jit(encode_step)"} <= set(first)
    assert sorted(second) == ["jit(<lambda>)", "jit(_fresh_state)"]


def test_a_second_start_answers_and_aliases_as_the_first(starts):
    (_, *first, counts), (_, *second, counts_again) = starts
    assert second == first
    assert counts_again["at_start"] == counts["at_start"] == len(first[1])
    assert counts_again["since"] == counts["since"] == 0
    assert all(size > 0 for name, size in second[1].items() if name != "read rows")


def test_a_loaded_executable_updates_in_place(cache):
    first, second = built(cache), built(cache)
    assert second is not first
    jax.tree.map(np.testing.assert_array_equal, answers(second), answers(first))
    state = jnp.ones(4)
    where = state.unsafe_buffer_pointer()
    state_after, _ = second(state, np.ones((8, 8), np.float32))
    assert state.is_deleted()
    assert state_after.unsafe_buffer_pointer() == where


def test_nothing_is_read_or_written_unless_asked_for(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(ExecutableCache, "beside_jax", lambda _: pytest.fail("asked for"))
    with llm_kit.build(tiny_checkpoint("qwen2_5_vl", **llm_kit.CHECKPOINT).path):
        pass


# ---- keys -----------------------------------------------------------------------------------------------------------


def other(factor: int, state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return state, x


def test_the_same_job_has_the_same_key():
    assert job([]).key(DEVICE) == job([]).key(DEVICE)


@pytest.mark.parametrize(
    "change",
    [{"function": partial(scaled, 4)}, {"function": partial(other, 3)}, {"size": 9}, {"donate": ()}],
    ids=["static argument", "function", "shape", "donated"],
)
def test_another_job_has_another_key(change):
    assert job([], **change).key(DEVICE) != job([]).key(DEVICE)


def test_compiler_options_count():
    class Gpu:
        platform, device_kind, id, client = "gpu", "H200", 0, DEVICE.client

    before = job([]).key(Gpu())
    assert job([], gpu_options={"xla_gpu_enable_triton_gemm": True}).key(Gpu()) != before
    assert job([]).key(DEVICE) != before


def test_settings_and_surroundings_count(monkeypatch):
    before = job([]).key(DEVICE)
    with jax.default_matmul_precision("bfloat16"):
        assert job([]).key(DEVICE) != before
    with jax.numpy_dtype_promotion("strict"):
        assert job([]).key(DEVICE) != before
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert job([]).key(DEVICE) != before


@pytest.mark.parametrize("package", ["mmjax", "kernels_pallas", "test_executable_cache"])
def test_the_source_counts(package, monkeypatch):
    """Ours, and that of the package which the function comes from."""
    before, source = job([]).key(DEVICE), fingerprint._source
    monkeypatch.setattr(fingerprint, "_source", lambda name: "changed" if name == package else source(name))
    assert job([]).key(DEVICE) != before


def test_a_changed_file_changes_the_source(tmp_path, monkeypatch):
    for folder, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / folder / "some_family").mkdir(parents=True)
        (tmp_path / folder / "some_family" / "sizes.json").write_text(text)
    digests = []
    for folder in "abc":
        module = ModuleType("some_family")
        module.__path__ = [str(tmp_path / folder / "some_family")]
        monkeypatch.setitem(sys.modules, "some_family", module)
        digests.append(fingerprint._source.__wrapped__("some_family"))
    assert digests[0] == digests[2] != digests[1]


def test_what_has_no_name_is_not_kept(cache):
    def local(state, x):
        return state, x

    step = built(cache, function=lambda state, x: (state, x * 2))
    assert np.array_equal(answers(step)[1], 2 * np.arange(64, dtype=np.float32).reshape(8, 8))
    built(cache, function=local)
    assert files(cache) == []
    assert job([], function=partial(scaled, object())).key(DEVICE) is None


def test_a_folder_elsewhere_is_jaxs_alone():
    with jax_told(compilation_cache_dir="gs://bucket/cache", enable_compilation_cache=False):
        assert ExecutableCache.beside_jax(DEVICE).directory is None
    with jax_told(compilation_cache_dir=None):
        assert ExecutableCache.beside_jax(DEVICE).directory is None


def test_what_jax_keeps_for_a_cpu_is_not_kept_twice(tmp_path):
    cpu, gpu = (SimpleNamespace(platform=platform) for platform in ("cpu", "gpu"))
    with jax_told(compilation_cache_dir=str(tmp_path), enable_compilation_cache=True):
        assert ExecutableCache.beside_jax(cpu).directory is None
        assert ExecutableCache.beside_jax(gpu).directory == tmp_path / "mmjax-executables"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_can_be_told_without_tracing(family):
    assert fingerprint.fingerprint(DEVICE, family) == fingerprint.fingerprint(DEVICE, replace(family))


# ---- files ----------------------------------------------------------------------------------------------------------


def checked(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: b"",
        lambda good: good[: len(good) // 2],
        lambda good: good[:-1] + bytes([good[-1] ^ 1]),
        lambda good: checked(b"not compressed"),
        lambda good: checked(zlib.compress(pickle.dumps(("of another version",)))),
    ],
    ids=["empty", "truncated", "one bit", "foreign", "version"],
)
def test_files_that_say_something_else_are_compiled_anew(cache, spoil, caplog):
    expected = answers(built(cache))
    (path,) = files(cache)
    good = path.read_bytes()
    path.write_bytes(spoil(good))
    with lowered() as names:
        jax.tree.map(np.testing.assert_array_equal, answers(built(cache)), expected)
    assert names == ["jit(scaled)"]
    assert "compiling instead" in caplog.text
    with lowered() as names:  # and written anew
        built(cache)
    assert names == []


def test_a_folder_that_can_not_be_written_only_warns(tmp_path, caplog):
    (tmp_path / "mmjax-executables").write_text("a file in its place")
    with jax_told(compilation_cache_dir=str(tmp_path), enable_compilation_cache=False):
        cache = ExecutableCache.beside_jax(DEVICE)
    with caplog.at_level(logging.DEBUG):
        assert len(answers(built(cache))) == 2
    assert [record.levelname for record in caplog.records if "can't be kept" in record.message] == ["WARNING", "DEBUG"]


def test_the_folder_is_the_users_own(tmp_path):
    with jax_told(compilation_cache_dir=str(tmp_path), enable_compilation_cache=False):
        cache = ExecutableCache.beside_jax(DEVICE)
    assert cache.directory.parent == tmp_path
    assert cache.directory.stat().st_mode & 0o777 == 0o700


def test_the_least_recently_used_go_first(cache):
    for size in (8, 9, 10):
        built(cache, size=size)
    sizes = {path: path.stat().st_size for path in files(cache)}
    kept = cache.directory / job([]).key(DEVICE)
    built(cache)  # the oldest, used again
    cache.prune(sizes[kept])
    assert files(cache) == [kept]


def _write(directory, barrier) -> None:
    cache = ExecutableCache(directory)
    with jax_told(enable_compilation_cache=False):
        compiled = job([]).lower().compile()
    barrier.wait()
    for _ in range(20):
        cache.store("key", compiled)


def test_two_processes_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    writers = [context.Process(target=_write, args=(tmp_path, barrier)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    cache = ExecutableCache(tmp_path)
    assert [path.name for path in files(cache)] == ["key"]
    assert len(answers(cache.load("key", DEVICE))) == 2
