# SPDX-License-Identifier: Apache-2.0
"""Executables on disk by a key that needs no tracing, so that a start which finds all of them only reads files."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import pickle
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from kernels_pallas import mosaic
from kernels_pallas.dispatch import local_device

logger = logging.getLogger(__name__)

MOST_BYTES = 4 << 30  # of all files together; an engine of a large model has some hundreds of MB
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class ExecutableCache:
    """Files of a folder, one an executable: a digest, then what unpickles to the executable.

    Loading one runs whatever it says, so the folder must be the user's own, like jax's. Files that can't be read or
    written cost time alone: the executable is compiled as if there were none.
    """

    directory: Path | None  # None keeps nothing

    @classmethod
    def beside_jax(cls, device: jax.Device) -> ExecutableCache:
        """Within the folder where jax keeps its own, wherever that is; without one nothing is kept.

        Nor on CPUs whose executables jax keeps: once written and read twice they lack functions.
        """
        directory = jax.config.jax_compilation_cache_dir
        kept_by_jax = device.platform == "cpu" and jax.config.jax_enable_compilation_cache
        if not directory or "://" in directory or kept_by_jax:
            return cls(None)
        cache = cls(Path(directory) / "mmjax-executables")
        try:
            cache.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(cache.directory, os.W_OK):
                raise PermissionError(f"{cache.directory} can't be written to")
        except OSError as error:  # what lies there may still be read
            logger.warning("executables can't be kept for the next start: %s", error)
        return cache

    def load(self, key: str | None, device: jax.Device) -> jax.stages.Compiled | None:
        """The executable of `key`, ready to run on `device`, or None."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            stored = path.read_bytes()
            digest, content = stored[:_DIGEST], stored[_DIGEST:]
            if hashlib.sha256(content).digest() != digest:  # before the runtime, which may crash on half a program
                raise ValueError("it is damaged")
            _register_custom_calls(device)
            executable = pickle.loads(zlib.decompress(content))
            compiled = deserialize_and_load(*executable, backend=device.client, execution_devices=[device])
        except Exception as error:  # whatever a file holds, compiling is the answer
            logger.warning("%s can't be loaded, compiling instead: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used go first
        return compiled

    def store(self, key: str | None, compiled: jax.stages.Compiled) -> None:
        """Keeps an executable for later starts. Another process may write the same one at the same time."""
        path = self._path(key)
        if path is None:
            return
        try:
            content = zlib.compress(pickle.dumps(serialize(compiled)), level=1)
        except Exception as error:  # whatever can't be written is compiled again
            logger.debug("an executable can't be kept: %s", error)
            return
        try:
            with tempfile.TemporaryDirectory(dir=self.directory) as folder:  # nobody sees half a file
                whole = Path(folder) / path.name
                whole.write_bytes(hashlib.sha256(content).digest() + content)
                os.replace(whole, path)
        except OSError as error:
            logger.debug("an executable can't be kept: %s", error)

    def prune(self, most_bytes: int = MOST_BYTES) -> None:
        """Removes the least recently used files beyond `most_bytes`."""
        try:
            files = [path for path in self.directory.iterdir() if path.is_file()] if self.directory else []
            for stat, path in sorted(((path.stat(), path) for path in files), key=lambda file: -file[0].st_mtime):
                most_bytes -= stat.st_size
                if most_bytes < 0:
                    path.unlink()
        except OSError as error:  # another process may be at it, too
            logger.debug("files of %s were not removed: %s", self.directory, error)

    def _path(self, key: str | None) -> Path | None:
        return self.directory / key if self.directory and key else None


NOTHING_KEPT = ExecutableCache(None)


def _register_custom_calls(device: jax.Device) -> None:
    """Executables call Mosaic's kernels by a name that an import registers; who traces them has imported it."""
    if mosaic.available(local_device(device.platform).compute_capability):
        importlib.import_module("jax.experimental.mosaic.gpu")
