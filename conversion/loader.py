# SPDX-License-Identifier: Apache-2.0
"""Parameters from a checkpoint directory to the device, one leaf at a time.

Names, shapes and dtypes are checked from the headers before any weight is read. Then a leaf is assembled in host memory
(fused, stacked, padded, cast), put on the device and dropped: host memory holds about one leaf, never the model.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from conversion.checkpoint import Checkpoint, describe
from conversion.dtypes import cast_into
from conversion.layout import Leaf, leaves
from conversion.matching import best_plan, match
from conversion.safetensors_file import DTYPES, StoredTensor, read_bytes
from mmjax.models.family import Family, ModelConfig

READ_THREADS = 4
SPARE_BYTES = 256 << 20  # leaves smaller than the largest are read ahead until they fill this much
CAST_BLOCK_BYTES = 16 << 20  # a tensor that needs a cast or padded rows passes through a block of this size


def load_params(
    path: str | Path,
    family: Family,
    cfg: ModelConfig,
    *,
    device: jax.Device | None = None,
    progress: bool = True,
) -> dict:
    """Parameters of `family` from a Hugging Face or a converted directory, in the dtypes of `family.spec(cfg)`.

    The stored dtype does not matter: float32, float16, bfloat16 and float64 tensors are cast (see `dtypes.cast_into`).

    Args:
      device: where the arrays go, committed; the first device if None.
      progress: show a bar, in bytes. A converted directory is restored in one call, without a bar.

    Raises:
      CheckpointError: files that are missing or damaged; all names that are missing, unexpected or misshaped, at once.
    """
    device = device or jax.devices()[0]
    checkpoint = describe(path, parts=("weights",))
    if checkpoint.manifest is not None:
        from conversion.orbax_io import load_converted  # orbax takes a second to import; Hugging Face users don't pay

        return load_converted(checkpoint, family, cfg, device=device)
    return load_hf(checkpoint, family, cfg, put=lambda leaf: jax.device_put(leaf, device), progress=progress)


def load_hf(
    checkpoint: Checkpoint,
    family: Family,
    cfg: ModelConfig,
    *,
    put: Callable[[np.ndarray], jax.Array],
    progress: bool = True,
) -> dict:
    """The parameter tree from a Hugging Face directory; `put` takes each assembled leaf to where it stays."""
    spec = family.spec(cfg)
    tables = (family.weights(cfg), *family.other_layouts(cfg))
    plan = best_plan(checkpoint, family, [leaves(table, spec) for table in tables])
    stored = match(checkpoint, family, plan)
    total = sum(leaf.nbytes for leaf in plan)
    values = []
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for leaf, array in assemble_all(plan, stored):
            values.append(jax.block_until_ready(put(array)))
            del array  # before the next leaf is waited for
            bar.update(leaf.nbytes)
    return jax.tree.unflatten(jax.tree.structure(spec), values)


def assemble_all(plan: list[Leaf], stored: dict[str, StoredTensor]) -> Iterator[tuple[Leaf, np.ndarray]]:
    """Leaves in order, read ahead by a few threads within the size of the largest leaf (or 256 MB if that is more)."""
    budget = max([SPARE_BYTES, *(leaf.nbytes for leaf in plan)])
    waiting: deque[tuple[Leaf, Future[np.ndarray]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(min(READ_THREADS, os.cpu_count() or 1), thread_name_prefix="mmjax-load") as pool:
        try:
            for leaf in plan:
                while waiting and ahead + leaf.nbytes > budget:
                    done, future = waiting.popleft()
                    yield done, future.result()
                    del future
                    ahead -= done.nbytes
                waiting.append((leaf, pool.submit(assemble, leaf, stored)))
                ahead += leaf.nbytes
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
                del future
        finally:
            for _, future in waiting:
                future.cancel()


def assemble(leaf: Leaf, stored: dict[str, StoredTensor]) -> np.ndarray:
    """One leaf in host memory: each tensor read into its box, the rest zeros."""
    array = (np.zeros if leaf.padded else np.empty)(leaf.shape, leaf.dtype)
    for piece in leaf.pieces:
        _read_into(piece.of(array), stored[piece.name])
    return array


def _read_into(out: np.ndarray, tensor: StoredTensor) -> None:
    dtype = DTYPES[tensor.dtype]
    if dtype == out.dtype and out.flags.c_contiguous:
        read_bytes(tensor, out)
        return
    if out.ndim > 1 and len(out) == 1:  # a stacked box: its rows lie one axis further in
        _read_into(out[0], tensor)
        return
    out = np.atleast_1d(out)
    row_bytes = tensor.nbytes // max(1, len(out))
    step = max(1, CAST_BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, len(out), step):
        rows = out[start : start + step]
        block = np.empty(rows.shape, dtype)
        read_bytes(tensor, block, start * row_bytes)
        cast_into(rows, block)
