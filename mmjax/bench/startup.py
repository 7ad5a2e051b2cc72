# SPDX-License-Identifier: Apache-2.0
"""Seconds from nothing to an engine that is ready, each in a process of its own: empty compilation cache, then full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from mmjax.bench.report import Figure
from mmjax.errors import EngineError

_CHILD = """
import sys, time
begin = time.perf_counter()
from mmjax.bench.startup import report_ready
report_ready(*sys.argv[1:], imported=time.perf_counter() - begin)
"""


def bench_startup(name: str, dtype: str | None, repeat: int) -> tuple[list[Figure], str]:
    """Cold and warm starts of the subject `name`, and the device's name. This process leaves the device alone."""
    cold, warm, device = [], [], ""
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            for times in (cold, warm):
                seconds, ready = _start(name, dtype, folder)
                times.append((seconds, ready))
                device = ready["device"]
    return [_figure(f"start to ready, {kind} cache", runs) for kind, runs in (("cold", cold), ("warm", warm))], device


def report_ready(name: str, dtype: str, imported: float) -> None:
    """The child's side, after `imported` seconds: loads, compiles, and prints what took how long as JSON."""
    from mmjax.bench.subject import Subject
    from mmjax.llm import LLM

    begin = time.perf_counter()
    subject = Subject(name, dtype or None)
    params = subject.params("vision", "text")
    loaded = time.perf_counter()
    with LLM.of(subject.model, params, device=subject.device, progress=False) as llm:
        stats = llm.stats()
    parts = {
        "import_s": imported,
        "weights_s": loaded - begin,
        "compile_s": stats.compiles["seconds"],
        "executables": stats.compiles["at_start"],
        "device": subject.device.device_kind,
    }
    print(json.dumps(parts))


def _start(name: str, dtype: str | None, cache: str) -> tuple[float, dict]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, name, dtype or ""],
        env=environment | {"XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise EngineError(f"the engine did not start: {done.stderr.strip()[-500:]}")
    return seconds, json.loads(done.stdout.splitlines()[-1])


def _figure(name: str, runs: list[tuple[float, dict]]) -> Figure:
    last = runs[-1][1]
    note = (
        f"import {last['import_s']:.1f} s, weights {last['weights_s']:.1f} s, "
        f"compile {last['compile_s']:.1f} s for {last['executables']} executables"
    )
    return Figure(name, [seconds for seconds, _ in runs], None, note, last)
