# SPDX-License-Identifier: Apache-2.0
"""Training the demo goes through the family's own functions: they differentiate, and branches stay apart."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FLOAT32_RELATIVE

from kernels_pallas.window_xla import gather_windows, rows_to_patches
from mmjax.demo import checkpoint_path, scenes
from mmjax.demo.training import step
from mmjax.demo.training.batches import BatchShape
from mmjax.demo.training.train import make_packer
from mmjax.models.qwen2_5_vl import FAMILY

SHAPE = BatchShape(1, patches=256, tokens=256, segments=12, windows=16, questions=12)


@pytest.fixture(scope="module")
def small():
    """A two-layer config, its pixel table and one packed batch."""
    hf = json.loads((checkpoint_path() / "config.json").read_text()) | {"dtype": "float32"}
    hf["text_config"]["num_hidden_layers"] = 2
    hf["vision_config"] |= {"depth": 2, "fullatt_block_indexes": [1]}
    cfg = FAMILY.config(hf)
    batch = {name: np.zeros(dims, dtype) for name, (dims, dtype) in SHAPE.fields().items()}
    make_packer(checkpoint_path(), scenes, 1.0).fill(batch, SHAPE, np.random.default_rng(1), True)
    return cfg, FAMILY.processor(cfg, checkpoint_path()).pixel_table(), batch


def test_loss_falls(small):
    cfg, table, batch = small
    state, losses = step.init_state(FAMILY, cfg, 0), []
    for _ in range(6):
        state, parts = step.train_step(FAMILY, cfg, state, table, batch, np.float32(3e-3), np.float32(1.0))
        losses.append(float(parts["answers"]))
    assert losses[-1] < 0.7 * losses[0]
    assert losses[0] == pytest.approx(np.log(cfg.vocab_size), abs=0.6)


def test_branches_do_not_see_each_other(small):
    cfg, table, batch = small
    slot = {name: array[0] for name, array in batch.items()}
    params = step.init_state(FAMILY, cfg, 0).params
    run = jax.jit(lambda slot: step._slot(FAMILY, cfg, params, table, slot)[0])
    last = slot["branch"][slot["example"] == 0].max()
    assert last >= 2
    inside = (slot["example"] == 0) & (slot["branch"] == 1)
    changed = dict(slot, token_ids=np.where(inside, (slot["token_ids"] + 1) % 256, slot["token_ids"]))
    before, after = np.asarray(run(slot)), np.asarray(run(changed))
    # Every token but those of the changed branch keeps its logits.
    np.testing.assert_array_equal(before[~inside], after[~inside])
    assert np.abs(before[inside] - after[inside]).max() > 1e-3


def test_gathers_have_the_gradients_of_plain_indexing():
    rng = np.random.default_rng(0)
    table = jnp.asarray(np.append(rng.permutation(10)[:9], [99, 99, 99]).reshape(3, 4), jnp.int32)
    x = jnp.asarray(rng.standard_normal((10, 2, 3)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((3, 4, 2, 3)), jnp.float32)

    def plain(x):
        return jnp.sum(jnp.sin(x.at[table].get(mode="fill", fill_value=0)) * weight)

    def ours(x):
        return jnp.sum(jnp.sin(gather_windows(x, table)) * weight)

    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(plain)(x), rtol=FLOAT32_RELATIVE)

    def put(rows):
        return jnp.sum(jnp.sin(rows_to_patches(rows.reshape(12, 2, 3), table, 10)) * x)

    back = jax.grad(put)(weight)
    scattered = jax.grad(lambda rows: jnp.sum(jnp.sin(jnp.zeros_like(x).at[table].set(rows, mode="drop")) * x))(weight)
    np.testing.assert_allclose(back, scattered, rtol=FLOAT32_RELATIVE)
