# SPDX-License-Identifier: Apache-2.0
"""Times decode attention over pages, one layer: `python tests/gpu/time_paged_decode.py --batch 1,64 --context 1024`.

Every implementation that runs here, in bfloat16, with the write of the new token; TB/s count the real keys and values.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas import cudnn, mosaic
from kernels_pallas.attention_cudnn import paged_decode_cudnn
from kernels_pallas.dispatch import local_device
from kernels_pallas.paged_kv import PagedDecode
from kernels_pallas.paged_xla import paged_decode_xla

# Pools that take turns, and rounds over them with other pages: more data than a cache holds.
LAYERS, ROUNDS, PAGE = 8, 16, 64


def implementations():
    """What can run here, by name."""
    if jax.default_backend() != "gpu":
        return {"xla": paged_decode_xla}
    found = {"cudnn": paged_decode_cudnn} if cudnn.available() else {"xla": paged_decode_xla}
    if mosaic.available(local_device("gpu").compute_capability):
        from kernels_pallas.paged_decode_mosaic import paged_decode_mosaic

        found["mosaic"] = paged_decode_mosaic
    return found


def rounds(attend, q, k, v, pools, metas):
    """ROUNDS steps of LAYERS layers, each waiting for the one before."""
    layer = jax.jit(attend)

    def body(index, state):
        out, pools = state
        meta, after = jax.tree.map(lambda x: x[index], metas), []
        for pool in pools:
            out, pool = layer((q + out / 4).astype(q.dtype), k, v, pool, meta)
            after.append(pool)
        return out, tuple(after)

    return lax.fori_loop(0, ROUNDS, body, (q, pools))


def make_metas(batch: int, context: int, blocks: int, width: int) -> PagedDecode:
    """Other random pages in every round, in tables of `width` entries."""
    rng, used = np.random.default_rng(0), -(-context // PAGE)
    tables = np.zeros((ROUNDS, batch, width), np.int32)
    for table in tables:
        table[:, :used] = rng.permutation(blocks)[: batch * used].reshape(batch, used)
    slots = tables[:, :, used - 1] * PAGE + (context - 1) % PAGE
    return PagedDecode(jnp.full((ROUNDS, batch), context, jnp.int32), jnp.asarray(tables), jnp.asarray(slots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--capacity", type=int, default=0, help="tokens that a table has room for; the context if 0")
    parser.add_argument("--heads", default="28,4,128", help="query heads, key heads, head dim")
    arguments = parser.parse_args()
    heads, kv_heads, width = map(int, arguments.heads.split(","))
    for batch in map(int, arguments.batch.split(",")):
        used = -(-arguments.context // PAGE)
        blocks, table = max(1024, batch * used), max(used, arguments.capacity // PAGE)
        keys = jax.random.split(jax.random.key(0), LAYERS + 3)
        draw = jax.jit(partial(jax.random.normal, dtype=jnp.bfloat16), static_argnums=1)
        pools = tuple(draw(key, (blocks, 2, kv_heads, PAGE, width)) for key in keys[3:])
        q, k, v = (draw(key, (batch, n, width)) for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=False))
        metas = make_metas(batch, arguments.context, blocks, table)
        size = batch * arguments.context * kv_heads * width * 4
        for name, attend in implementations().items():
            run = jax.jit(partial(rounds, partial(attend, scale=width**-0.5)), donate_argnums=3)
            seconds = []
            for _ in range(6):
                start = time.perf_counter()
                pools = jax.block_until_ready(run(q, k, v, pools, metas))[1]
                seconds.append((time.perf_counter() - start) / (ROUNDS * LAYERS))
            median = float(np.median(seconds[1:]))
            speed = f"{median * 1e6:8.1f} us, {size / median / 1e12:.2f} TB/s"
            print(f"{name:8s} batch {batch:4d} context {arguments.context}: {speed}", flush=True)


if __name__ == "__main__":
    main()
