# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files: the header once, then byte ranges straight into buffers of the caller's.

The library's own reader maps the file and copies every tensor out under the interpreter lock. Plain reads into the
fused buffer need no second copy, leave no mapped pages in the process and run in parallel threads; they were twice as
fast where this was measured.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from mmjax.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

FLOAT_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INTEGER_DTYPES = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}
DTYPES = FLOAT_DTYPES | INTEGER_DTYPES


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. `dtype` is the format's own name (F32, BF16, I64, F8_E4M3, ...); `offset` is absolute."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file, in the order of the header. Reads no data.

    Raises:
      CheckpointError: not a safetensors file, a Git LFS pointer, or shorter than its header says.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` there")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file: its header claims {length} bytes")
        if 8 + length > size:
            raise CheckpointError(f"{path} is truncated: {size} bytes, its header alone needs {8 + length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} is truncated: {size} bytes, its header promises {end}")
    return tensors


def _stored(path: Path, name: str, entry: dict, base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    known = DTYPES.get(dtype)
    if begin > end or (known is not None and math.prod(shape) * known.itemsize != end - begin):
        raise CheckpointError(f"{path}: {name} is {dtype} {list(shape)}, but the file holds {end - begin} bytes for it")
    return StoredTensor(name, path, dtype, shape, base + begin, end - begin)


def read_bytes(tensor: StoredTensor, out: np.ndarray, start: int = 0) -> None:
    """Fills `out`, a C-contiguous array of any dtype, with the tensor's bytes from byte `start` on.

    Releases the interpreter lock while it reads.
    """
    view = memoryview(out.reshape(-1).view(np.uint8))
    with open(tensor.file, "rb", buffering=0) as file:
        file.seek(tensor.offset + start)
        while view:
            count = file.readinto(view)
            if not count:
                raise CheckpointError(f"{tensor.file} ended while {tensor.name} was being read")
            view = view[count:]
