# SPDX-License-Identifier: Apache-2.0
"""Batches from worker processes through shared memory. Start it before JAX: the workers are forked."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Callable, Iterator
from types import TracebackType

import numpy as np

from mmjax.demo.training.batches import BatchShape, Packer

_ALIGN = 64


def _views(buffer: mmap.mmap, shape: BatchShape) -> dict[str, np.ndarray]:
    views, offset = {}, 0
    for name, (dims, dtype) in shape.fields().items():
        count = int(np.prod(dims))
        views[name] = np.frombuffer(buffer, dtype, count, offset).reshape(dims)
        offset += -(-count * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
    return views


def _size(shape: BatchShape) -> int:
    return sum(int(np.prod(dims)) * np.dtype(dtype).itemsize + _ALIGN for dims, dtype in shape.fields().values())


class Feed:
    """An endless stream of batches. Batch `i` depends on `seed` and `i` alone, whoever draws it.

    Args:
      make_packer: called once in each worker.
      easy: batches with a smaller index keep to easy examples.
      buffers: batches that may wait, beside those being drawn.
    """

    def __init__(
        self, make_packer: Callable[[], Packer], shape: BatchShape, seed: int, workers: int, easy: int, buffers: int = 4
    ):
        context = multiprocessing.get_context("fork")
        self._free, self._full = context.SimpleQueue(), context.SimpleQueue()
        memory = [mmap.mmap(-1, _size(shape)) for _ in range(workers + buffers)]
        self._buffers = [_views(block, shape) for block in memory]
        counter = context.Value("q", 0)

        def work() -> None:
            packer = make_packer()
            while True:
                buffer = self._free.get()
                with counter.get_lock():
                    index = counter.value
                    counter.value += 1
                packer.fill(self._buffers[buffer], shape, np.random.default_rng((seed, index)), index < easy)
                self._full.put(buffer)

        self._workers = [context.Process(target=work, daemon=True) for _ in range(workers)]
        for worker in self._workers:
            worker.start()
        for buffer in range(len(self._buffers)):
            self._free.put(buffer)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Views of shared memory, each valid until the next is asked for."""
        while True:
            buffer = self._full.get()
            yield self._buffers[buffer]
            self._free.put(buffer)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.terminate()
            worker.join()
