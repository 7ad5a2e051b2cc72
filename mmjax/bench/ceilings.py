# SPDX-License-Identifier: Apache-2.0
"""What the device reaches at best: a large matrix product, and large copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmjax.bench.floors import Ceilings
from mmjax.bench.report import Figure
from mmjax.bench.timing import measure

# (side of the square matrices, bytes that a copy reads); large enough to fill the device, small enough to be quick.
_SIZES = {"cpu": (1024, 64 << 20), "gpu": (8192, 4 << 30)}


def measure_ceilings(device: jax.Device, dtype: str, repeat: int) -> tuple[Ceilings, list[Figure]]:
    """Rates of this device: the faster of two kinds of copy counts."""
    side, size = _SIZES["cpu" if device.platform == "cpu" else "gpu"]
    operations = 2 * side**3
    times = _products(device, dtype, side, repeat)
    product = Figure(f"matrix product {side}^3, {dtype}", times)
    product = Figure(product.name, times, note=f"{operations / product.median / 1e12:.3g} TFLOP/s")
    figures, copy = [product], 0.0
    values = _draw(device, "float32", (size // 4,), 2)
    for name, function in (("copy", jnp.copy), ("read, add, write", lambda x: x + 1)):
        compiled = jax.jit(function)
        times = measure(lambda _, compiled=compiled: compiled(values), repeat)
        rate = 2 * size / Figure(name, times).median
        figures.append(Figure(f"{name} {size >> 20} MiB", times, note=f"{rate / 1e12:.3g} TB/s"))
        copy = max(copy, rate)
    return Ceilings(operations / product.median, copy), figures


def _products(device: jax.Device, dtype: str, side: int, repeat: int) -> list[float]:
    with jax.default_matmul_precision("highest" if dtype == "float32" else None):
        product = jax.jit(jnp.matmul)
        pairs = [tuple(_draw(device, dtype, (side, side), 2 * k + i) for i in (0, 1)) for k in range(2)]
        return measure(lambda index: product(*pairs[index % 2]), repeat)


def _draw(device: jax.Device, dtype: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    with jax.default_device(device):
        return jax.random.normal(jax.random.key(seed), shape, dtype)
