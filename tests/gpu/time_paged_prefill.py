# SPDX-License-Identifier: Apache-2.0
"""Times paged prefill attention: `python tests/gpu/time_paged_prefill.py`.

28 query heads over 4 key heads of 128, pages of 64, bfloat16, the writes to pages included; a step is
tokens@prefix of each sequence. TFLOP/s count the products of what is seen alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.attention_cudnn import paged_prefill_cudnn
from kernels_pallas.dispatch import PagedPrefill
from kernels_pallas.paged_prefill_mosaic import paged_prefill_mosaic
from mmjax.bench.timing import measure

HEADS, KV_HEADS, WIDTH, PAGE, CALLS = 28, 4, 128, 64, 10
STEPS = ["58@1344", "120@1344", "1356@0", "6x1338@0", "1338@1024 5x1338@0", "8x1024@0", "8192@8192"]


def sequences(step: str) -> list[tuple[int, int]]:
    """(tokens, prefix) of each sequence."""
    parsed = []
    for part in step.split():
        count, _, rest = part.rpartition("x")
        parsed += [tuple(map(int, rest.split("@")))] * int(count or 1)
    return parsed


def problem(step: str):
    """(q, k, v, pool, meta), and the operations."""
    own = sequences(step)
    tokens = -(-sum(n for n, _ in own) // 64) * 64
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 4)
    counts = [-(-(n + prefix) // PAGE) for n, prefix in own]
    tables, blocks = np.zeros((len(own), 512), np.int32), rng.permutation(sum(counts))
    slots, cu = np.full(tokens, len(blocks) * PAGE, np.int32), np.cumsum([0, *(n for n, _ in own)]).astype(np.int32)
    for s, ((n, prefix), count) in enumerate(zip(own, counts, strict=True)):
        tables[s, :count], blocks = blocks[:count], blocks[count:]
        at = np.arange(prefix, prefix + n)
        slots[cu[s] : cu[s + 1]] = tables[s, at // PAGE] * PAGE + at % PAGE
    shapes = [(tokens, HEADS, WIDTH), *[(tokens, KV_HEADS, WIDTH)] * 2, (sum(counts), 2, KV_HEADS, PAGE, WIDTH)]
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    meta = PagedPrefill(cu, np.array([prefix for _, prefix in own], np.int32), tables, slots)
    return arrays, jax.device_put(meta), sum(4 * n * (prefix + n / 2) * HEADS * WIDTH for n, prefix in own)


def main() -> None:
    for step in STEPS:
        (q, k, v, pool), meta, operations = problem(step)
        attends = {"cudnn": paged_prefill_cudnn, "mosaic": paged_prefill_mosaic}
        metas = {"": meta}
        if not np.asarray(meta.prefix_lens).any():
            metas[" without prefix"] = meta.replace(any_prefix=False)
        for name, attend in attends.items():
            for kind, own in metas.items():
                if kind and name != "cudnn":
                    continue
                run = jax.jit(lambda q, k, v, pool, meta, attend=attend: attend(q, k, v, pool, meta, WIDTH**-0.5)[0])
                calls = measure(lambda _: [run(q, k, v, pool, own) for _ in range(CALLS)], 4, per_call=CALLS)  # noqa: B023
                seconds = float(np.median(calls))
                rate = operations / seconds / 1e12
                print(f"{step}: {name}{kind} {seconds * 1e6:.0f} us, {rate:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
