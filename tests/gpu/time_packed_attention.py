# SPDX-License-Identifier: Apache-2.0
"""Times packed attention: `python tests/gpu/time_packed_attention.py --head-dims 64,80 --shapes 16x1024,4x4096`.

Every implementation that runs here, in bfloat16 with 16 heads; a shape is segments x tokens of each. TFLOP/s count the
products alone.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import cudnn, mosaic
from kernels_pallas.attention_cudnn import packed_attention_cudnn
from kernels_pallas.dispatch import local_device
from kernels_pallas.packed_xla import packed_attention_xla
from mmjax.bench.timing import measure

HEADS, CALLS = 16, 12


def implementations(head_dim):
    """What can run here, by name."""
    if jax.default_backend() != "gpu":
        return {"xla": packed_attention_xla}
    found = {"cudnn": packed_attention_cudnn} if cudnn.available() else {"xla": packed_attention_xla}
    if mosaic.available(local_device("gpu").compute_capability) and head_dim in mosaic.packed_tuning():
        from kernels_pallas.packed_mosaic import packed_attention_mosaic

        found["mosaic"] = packed_attention_mosaic
    return found


def seconds(attend, segments, length, head_dim):
    """The median of a call that waits for nothing but the call before it."""
    shape = segments * length, HEADS, head_dim
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
    cu = jnp.arange(segments + 1, dtype=jnp.int32) * length
    run = jax.jit(lambda *a: attend(*a, head_dim**-0.5))
    return float(np.median(measure(lambda _: [run(q, k, v, cu) for _ in range(CALLS)], 5, per_call=CALLS)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="64,72,80,128")
    parser.add_argument("--shapes", default="16x1024,4x4096,1x16384")
    arguments = parser.parse_args()
    for head_dim in map(int, arguments.head_dims.split(",")):
        for shape in arguments.shapes.split(","):
            segments, length = map(int, shape.split("x"))
            work = 4 * segments * length**2 * HEADS * head_dim
            for name, attend in implementations(head_dim).items():
                rate = work / seconds(attend, segments, length, head_dim) / 1e12
                print(f"head dim {head_dim}, {shape}: {name} {rate:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
