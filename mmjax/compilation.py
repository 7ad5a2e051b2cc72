# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation: load what is kept, lower the rest here, compile in a pool, count what comes later."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from mmjax.errors import DeviceError
from mmjax.executable_cache import NOTHING_KEPT, ExecutableCache
from mmjax.fingerprint import UnstableError, fingerprint

logger = logging.getLogger(__name__)

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Job:
    """One executable to build: of a pure `function`, whose `arguments` are ShapeDtypeStructs."""

    name: str
    function: Callable
    arguments: tuple
    keep: Callable[[Any], None]  # receives the jax.stages.Compiled
    donate: tuple[int, ...] = ()  # arguments that are updated in place
    gpu_options: Mapping[str, Any] = field(default_factory=dict)  # of the compiler, beside `GPU_OPTIONS`

    def lower(self) -> jax.stages.Lowered:
        """Traces the function."""
        return jax.jit(self.function, donate_argnums=self.donate).lower(*self.arguments)

    def options(self, device: jax.Device) -> dict[str, Any] | None:
        """The compiler's."""
        return GPU_OPTIONS | self.gpu_options if device.platform == "gpu" else None

    def key(self, device: jax.Device) -> str | None:
        """Of the executable in an `ExecutableCache`; None if it can't be told from others without tracing."""
        try:
            return fingerprint(device, self.function, self.arguments, self.donate, self.options(device))
        except UnstableError as reason:
            logger.debug("%s is compiled at every start: %s", self.name, reason)
            return None


# XLA's own matrix products through Triton: in stand-alone scripts on an H200 they were 2 to 4 % slower than cuBLAS, and
# trying them all out took two thirds of the compile time.
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def compile_all(
    jobs: Iterable[Job],
    *,
    device: jax.Device,
    kept: ExecutableCache = NOTHING_KEPT,
    threads: int | None = None,
    progress: bool = True,
) -> None:
    """Loads executables that are kept, in a pool; lowers the others here (tracing is not parallel), the pool compiles.

    What is compiled is kept for the next start.
    """
    jobs = list(jobs)
    if not jobs:
        return
    threads = threads or min(16, os.cpu_count() or 1)
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="mmjax-compile") as pool,
        tqdm(total=len(jobs), desc="compile", unit="step", disable=not progress, leave=False) as bar,
    ):

        def ready(name: str) -> None:
            with tqdm.get_lock():
                bar.set_postfix_str(name, refresh=False)
                bar.update()

        keys = [job.key(device) for job in jobs]
        loads = [pool.submit(kept.load, key, device) for key in keys]
        compiling = {}
        with _no_garbage_collection():
            for job, key, load in zip(jobs, keys, loads, strict=True):
                if (executable := load.result()) is not None:
                    job.keep(executable)
                    ready(job.name)
                else:
                    future = pool.submit(job.lower().compile, job.options(device))
                    future.add_done_callback(lambda _, name=job.name: ready(name))
                    compiling[future] = job, key
        # Only now: what writes an executable out holds the interpreter, which lowering needs.
        for future in as_completed(compiling):
            job, key = compiling[future]
            job.keep(future.result())
            pool.submit(kept.store, key, future.result())
    if compiling:
        kept.prune()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Lowering leaves a million objects that stay alive; looking through them time and again cost a tenth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def bytes_needed(step: Any) -> int:
    """Device memory that a compiled step takes while it runs, beside its arguments and what it writes in place."""
    memory = step.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def shapes_on(device: jax.Device, tree: Any) -> Any:
    """Shapes and dtypes of a tree of arrays or shapes that will live on `device`: they decide what is compiled for."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def use_persistent_cache() -> None:
    """Keeps executables in the user's cache folder, unless jax is already told where.

    Anyone who can write there can run code in this process, so it must be the user's own. Where it can't be made,
    executables are compiled anew at every start.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    directory = root / "mmjax" / f"jax-{jax.__version__}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        logger.warning("executables can't be kept for the next start: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what a failed executable raises into DeviceError, which the engine can recover from."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise DeviceError(f"the device failed: {error}") from error


@dataclass
class CompileCounter:
    """Counts every backend compilation of the process from `start()` on, with the names of the functions compiled."""

    names: list[str] = field(default_factory=list)

    def start(self) -> CompileCounter:
        """Registers the listener; `stop()` takes it away again."""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def stop(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **details: Any) -> None:
        if event == _BACKEND_COMPILE:
            self.names.append(str(details.get("fun_name", "?")))

    @property
    def count(self) -> int:
        """Compilations seen so far."""
        return len(self.names)
