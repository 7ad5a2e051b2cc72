# SPDX-License-Identifier: Apache-2.0
"""The second plane's device side: owns the row pool, and one executable per encoder bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.dispatch import vision_ops
from mmjax.compilation import Job, device_errors, shapes_on
from mmjax.inputs.items import EncoderBucket, ProcessedItem
from mmjax.models.family import Family, ModelConfig, Processor
from mmjax.models.steps import encode_step, read_rows, write_rows

COPY_ROWS = 256  # rows that one call of read_rows or write_rows moves


class EncoderRunner:
    """Compiles and runs the vision tower, and moves rows in and out of the pool.

    Nothing outside the two runners sees the pool: a live view of it would turn donation into a silent copy.
    """

    def __init__(
        self,
        family: Family,
        cfg: ModelConfig,
        params: dict | None,
        processor: Processor,
        buckets: Sequence[EncoderBucket],
        pool_rows: int,
        *,
        device: jax.Device,
    ):
        self.family, self.cfg, self.params, self.processor, self.device = family, cfg, params, processor, device
        self.buckets = tuple(buckets)
        self.pool_rows = pool_rows
        self._table = jax.device_put(processor.pixel_table(), device)
        self._encode: dict[EncoderBucket, Any] = {}
        self._copies: dict[str, Any] = {}
        self.pool: jax.Array | None = None
        self._make_pool: Callable[[], jax.Array] | None = None

    def allocate(self) -> None:
        """Makes the pool; after a device error, makes it again."""
        self.pool = None  # the old one goes first: two may not fit
        if self._make_pool is None:
            shape, sharding = (self.pool_rows, self.cfg.row_width), jax.sharding.SingleDeviceSharding(self.device)
            make = jax.jit(lambda: jnp.zeros(shape, self.cfg.dtype), out_shardings=sharding)
            self._make_pool = make.lower().compile()
        self.pool = self._make_pool()

    def jobs(self) -> list[Job]:
        """Compile jobs of the pool's doors and of every bucket, largest first, as far as they are not compiled yet."""
        shape = jax.ShapeDtypeStruct
        pool, slots, rows = shapes_on(
            self.device,
            (
                shape((self.pool_rows, self.cfg.row_width), self.cfg.dtype),
                shape((COPY_ROWS,), jnp.int32),
                shape((COPY_ROWS, self.cfg.row_width), jnp.float32),
            ),
        )
        copies = [
            Job("read rows", read_rows, (pool, slots), partial(self._copies.__setitem__, "read")),
            Job("write rows", write_rows, (pool, rows, slots), partial(self._copies.__setitem__, "write"), (0,)),
        ]
        jobs = [] if self._copies else copies
        if self.params is None:
            return jobs
        encode = partial(encode_step, self.family, self.cfg, vision_ops(self.device.platform))
        params, table = shapes_on(self.device, (self.params, self._table))
        for bucket in reversed(self.buckets):
            if bucket in self._encode:
                continue
            inputs = self.family.vision_inputs(self.cfg, bucket)
            inputs, row_slots = shapes_on(self.device, (inputs, shape((bucket.rows,), jnp.int32)))
            arguments = (params, table, pool, inputs, row_slots)
            jobs.append(Job(_name(bucket), encode, arguments, partial(self._encode.__setitem__, bucket), (2,)))
        return jobs

    def release(self) -> None:
        """Lets go of arrays and executables."""
        self.params = self.pool = self._table = None
        self._encode.clear()
        self._copies.clear()

    def executables(self) -> dict[str, Any]:
        """Every compiled function by name, for memory accounting and tests."""
        encode = {_name(bucket): compiled for bucket, compiled in self._encode.items()}
        return encode | {f"{name} rows": compiled for name, compiled in self._copies.items()}

    def pack(self, items: Sequence[ProcessedItem], bucket: EncoderBucket) -> Any:
        """The family's inputs for `items`, host arrays padded to `bucket`."""
        return self.processor.pack(items, bucket)

    def encode(self, inputs: Any, slots: Sequence[np.ndarray], bucket: EncoderBucket) -> None:
        """Encodes packed items in one call of `bucket`; rows of item i land in pool rows slots[i] (int32), in order."""
        row_slots = np.full(bucket.rows, self.pool_rows, np.int32)
        joined = np.concatenate(slots)
        row_slots[: len(joined)] = joined
        with device_errors():
            self.pool = self._encode[bucket](self.params, self._table, self.pool, inputs, row_slots)

    def write(self, rows: np.ndarray, slots: np.ndarray) -> None:
        """Puts float32 rows [R, row_width] that the caller supplied into pool rows `slots`."""
        for start in range(0, len(rows), COPY_ROWS):
            part = np.zeros((COPY_ROWS, self.cfg.row_width), np.float32)
            part[: len(rows[start : start + COPY_ROWS])] = rows[start : start + COPY_ROWS]
            with device_errors():
                self.pool = self._copies["write"](self.pool, part, self._padded(slots, start))

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Float32 copies [R, row_width] of pool rows `slots`; waits for the device."""
        starts = range(0, len(slots), COPY_ROWS)
        with device_errors():
            parts = [self._copies["read"](self.pool, self._padded(slots, start)) for start in starts]
            return np.concatenate([np.asarray(part) for part in parts])[: len(slots)]

    def _padded(self, slots: np.ndarray, start: int) -> np.ndarray:
        padded = np.full(COPY_ROWS, self.pool_rows, np.int32)
        part = slots[start : start + COPY_ROWS]
        padded[: len(part)] = part
        return padded


def _name(bucket: EncoderBucket) -> str:
    """Buckets of equal tokens may differ in contexts and window rows."""
    return f"encode {bucket.key.total_tokens} x {bucket.key.num_contexts} + {bucket.window_rows}"
