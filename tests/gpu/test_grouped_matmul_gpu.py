# SPDX-License-Identifier: Apache-2.0
"""Claim: on a Hopper GPU the grouped product of half precision is the kernel's, and equals float32 up to rounding."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import HALF_PRODUCT

from kernels_pallas.grouped_matmul import (
    FEW_ROWS,
    MANY_ROWS,
    choose,
    group_rows,
    grouped_gated_matmul,
    grouped_matmul,
    on_hopper,
    spread,
)
from kernels_pallas.grouped_matmul_xla import grouped_matmul_xla
from mmjax.layers.moe import moe_mlp

EXPERTS, WIDTH, OUTER, CHOSEN = 128, 2048, 1536, 8


class Routing(NamedTuple):
    experts_per_token: int = CHOSEN
    norm_topk: bool = True


@partial(jax.jit, static_argnames="gated")
def both(x, matrices, group_of_row, gated):
    """The chosen implementation, and the loop in XLA on the same inputs in float32."""
    groups = group_rows(group_of_row, len(matrices))
    rows = spread(x, groups, CHOSEN)
    ours = (grouped_gated_matmul if gated else grouped_matmul)(rows, matrices, groups)
    exact = grouped_matmul_xla(rows.astype(jnp.float32), matrices.astype(jnp.float32), groups)
    if gated:
        gate, up = jnp.split(exact, 2, axis=-1)
        exact = jax.nn.silu(gate) * up
    return ours[groups.slot].astype(jnp.float32), exact[groups.slot]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "kernel"), [(1, "tiles"), (16, "tiles"), (4096, "persistent")])
def test_equals_float32(dtype, tokens, kernel, gated):
    if not on_hopper():
        pytest.skip("the kernels are for Hopper")
    block_rows = FEW_ROWS if kernel == "tiles" else MANY_ROWS
    assert choose(True, dtype, WIDTH, OUTER, block_rows) == kernel
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, WIDTH), dtype) / 2
    matrices = jax.random.normal(keys[1], (EXPERTS, WIDTH, OUTER), dtype) * jnp.asarray(WIDTH**-0.5, dtype)
    group_of_row = jax.random.randint(keys[2], (tokens * CHOSEN,), 0, EXPERTS // 2)
    ours, exact = both(x, matrices, group_of_row, gated)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=HALF_PRODUCT[dtype])


def test_padding_may_hold_anything():
    keys = jax.random.split(jax.random.key(0), 4)
    layer = {
        "router": jax.random.normal(keys[0], (EXPERTS, WIDTH), "bfloat16"),
        "experts_gate_up": jax.random.normal(keys[1], (EXPERTS, WIDTH, OUTER), "bfloat16") * 0.02,
        "experts_down": jax.random.normal(keys[2], (EXPERTS, OUTER // 2, WIDTH), "bfloat16") * 0.02,
    }
    clean = jax.random.normal(keys[3], (24, WIDTH), "bfloat16").at[17:].set(0)
    outs = [
        np.asarray(jax.jit(moe_mlp, static_argnums=2)(x, layer, Routing()).astype(jnp.float32))[:17]
        for x in (clean, clean.at[17:].set(jnp.nan))
    ]
    assert np.isfinite(outs[0]).all()
    assert np.array_equal(*outs)
