# SPDX-License-Identifier: Apache-2.0
"""Loss, gradients and updates over batches of slots, through the family's own encode and forward."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kernels_pallas.window_xla import gather_windows
from mmjax.demo.scenes import COLOURS, SHAPES
from mmjax.demo.training.batches import UNSURE, VISION_FIELDS
from mmjax.demo.training.dense import OPS, Conversation, attend
from mmjax.layers.fusion import StepTokens
from mmjax.models.family import Family, ModelConfig
from mmjax.models.vision_inputs import VisionInputs

BETAS, EPS, DECAY, MAX_NORM = (0.9, 0.98), 1e-8, 0.02, 1.0
MUON, MOMENTUM = ("qkv", "o", "proj", "gate_up", "down", "fc1", "fc2"), 0.95


@struct.dataclass
class TrainState:
    """Float32 parameters and the optimisers' moments. `params` also holds the "cells" head, which is not shipped."""

    params: dict
    first: dict
    second: dict
    step: Array


def init_state(family: Family, cfg: ModelConfig, seed: int) -> TrainState:
    """Matrices by their fan-in, branches' last matrices smaller, norms 1, biases 0."""
    spec = dict(family.spec(cfg))
    for name, classes in (("colour", len(COLOURS) + 1), ("shape", len(SHAPES) + 1)):
        spec[f"cells_{name}"] = jax.ShapeDtypeStruct((classes, cfg.row_width), jnp.float32)
    flat, tree = jax.tree_util.tree_flatten_with_path(spec)
    keys = jax.random.split(jax.random.key(seed), len(flat))

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct, key: Array) -> Array:
        name = str(path[-1].key)
        if "norm" in name:
            return jnp.ones(leaf.shape, jnp.float32)
        if "bias" in name:
            return jnp.zeros(leaf.shape, jnp.float32)
        scale = 0.02 if name == "embed" else leaf.shape[-1] ** -0.5
        if name in ("o", "proj", "down"):
            scale *= 0.3
        return scale * jax.random.normal(key, leaf.shape, jnp.float32)

    params = tree.unflatten([draw(path, leaf, key) for (path, leaf), key in zip(flat, keys, strict=True)])
    return fresh_state(params)


def fresh_state(params: dict) -> TrainState:
    """Parameters with moments at zero."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return TrainState(params, zeros, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))


def _slot(family: Family, cfg: ModelConfig, params: dict, table: Array, slot: dict) -> tuple[Array, Array]:
    """One slot's logits [T, V] and embedding rows [R, E]."""
    inputs = VisionInputs(**{name: slot[name] for name in VISION_FIELDS})
    rows = family.encode(params["vision"], cfg, inputs, table, OPS)
    is_row = slot["row_index"] < len(rows)
    # A product with one-hot rows instead of a look-up: its gradient is a product too.
    text = jax.nn.one_hot(slot["token_ids"], cfg.vocab_size, dtype=rows.dtype) @ params["text"]["embed"]
    placed = gather_windows(rows[:, None], slot["row_index"][:, None])[:, 0, 0]
    hidden = jnp.where(is_row[:, None], placed, text)
    meta = Conversation(slot["example"], slot["branch"])
    kv, tokens = ((),) * cfg.num_layers, StepTokens(slot["token_ids"], is_row)
    hidden, _ = family.forward(params["text"], cfg, hidden, slot["rotary"], kv, meta, attend, None, tokens)
    return family.logits(params["text"], cfg, hidden), rows


def _cell_loss(rows: Array, head: Array, labels: Array) -> Array:
    """Cross-entropy of what covers each cell, background counting a tenth."""
    log_probs = jax.nn.log_softmax(rows.astype(jnp.float32) @ head.T)
    weight = jnp.where(labels == UNSURE, 0.0, jnp.where(labels == 0, 0.1, 1.0))
    picked = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(weight * picked) / jnp.maximum(jnp.sum(weight), 1.0)


def _loss(
    params: dict, family: Family, cfg: ModelConfig, table: Array, batch: dict, cells: Array
) -> tuple[Array, dict]:
    dtype = jnp.dtype(cfg.dtype)
    model = {name: jax.tree.map(lambda x: x.astype(dtype), params[name]) for name in ("vision", "text")}
    logits, rows = jax.vmap(partial(_slot, family, cfg, model, table))(batch)
    counted = batch["target"] >= 0
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, jnp.maximum(batch["target"], 0)[..., None], axis=-1)[..., 0]
    answers = -jnp.sum(jnp.where(counted, picked, 0.0)) / jnp.sum(counted)
    colours = _cell_loss(rows, params["cells_colour"], batch["cell_colour"])
    shapes = _cell_loss(rows, params["cells_shape"], batch["cell_shape"])
    right = jnp.sum(counted & (logits.argmax(-1) == batch["target"])) / jnp.sum(counted)
    parts = {"answers": answers, "colours": colours, "shapes": shapes, "tokens_right": right}
    return answers + cells * (colours + shapes), parts


def orthogonal(update: Float[Array, "out in"]) -> Float[Array, "out in"]:
    """Nearly the orthogonal matrix nearest to `update`: the Newton-Schulz iteration of the Muon optimiser."""
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2,))
def train_step(
    family: Family,
    cfg: ModelConfig,
    state: TrainState,
    table: Float[Array, "C 256"],
    batch: dict,
    rate: Float[Array, ""],
    cells: Float[Array, ""],
) -> tuple[TrainState, dict]:
    """One step at learning rate `rate`: Muon for the matrices of blocks and layers, AdamW for all else.

    `cells` weighs the loss of the cell labels.
    """
    (_, parts), grads = jax.value_and_grad(_loss, has_aux=True)(state.params, family, cfg, table, batch, cells)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    shrink = jnp.minimum(1.0, MAX_NORM / (norm + 1e-6))
    step = state.step + 1
    beta1, beta2 = BETAS

    def moved(path: tuple, p: Array, g: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
        g = g * shrink
        if path[-1].key in MUON:
            m = MOMENTUM * m + g
            direction = 0.2 * max(p.shape) ** 0.5 * orthogonal(g + MOMENTUM * m)
        else:
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * jnp.square(g)
            direction = (m / (1 - beta1**step)) / (jnp.sqrt(v / (1 - beta2**step)) + EPS)
        return p - rate * (direction + (DECAY * p if p.ndim > 1 else 0.0)), m, v

    moved_leaves = jax.tree_util.tree_map_with_path(moved, state.params, grads, state.first, state.second)
    params, first, second = jax.tree.transpose(
        jax.tree.structure(state.params), jax.tree.structure((0, 0, 0)), moved_leaves
    )
    return TrainState(params, first, second, step), parts | {"norm": norm}


@partial(jax.jit, static_argnums=(0, 1))
def wrong_tokens(
    family: Family, cfg: ModelConfig, params: dict, table: Float[Array, "C 256"], batch: dict
) -> Int[Array, "slots questions"]:
    """How many tokens of each question's answer are not the likeliest ones.

    A question without any is one that greedy decoding answers word for word.
    """
    dtype = jnp.dtype(cfg.dtype)
    model = {name: jax.tree.map(lambda x: x.astype(dtype), params[name]) for name in ("vision", "text")}

    def count(slot: dict) -> Array:
        logits, _ = _slot(family, cfg, model, table, slot)
        wrong = (slot["target"] >= 0) & (logits.argmax(-1) != slot["target"])
        questions = len(slot["kinds"])
        return jnp.zeros(questions, jnp.int32).at[slot["question"] % (questions + 1)].add(wrong, mode="drop")

    return jax.lax.map(count, batch, batch_size=min(16, batch["target"].shape[0]))
