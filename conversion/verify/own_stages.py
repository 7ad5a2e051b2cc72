# SPDX-License-Identifier: Apache-2.0
"""Our side of a verification: mmjax's own host path, then the family's functions with plain masks in float32."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Int

from conversion.verify.prompt import VerifyPrompt
from conversion.verify.stages import Stages
from kernels_pallas.dispatch import reference_attention
from mmjax.config import MultimodalConfig
from mmjax.frontend import Frontend, InputOptions
from mmjax.inputs.items import ProcessedItem
from mmjax.inputs.prompt import PreparedPrompt
from mmjax.loading import Model, load_params, open_model
from mmjax.models.family import Processor
from mmjax.models.steps import embed_tokens
from mmjax.reference.runner import ReferenceRunner, exact_bucket


def own_stages(
    path: Path,
    prompt: VerifyPrompt,
    continuation: Int[np.ndarray, "G"],
    *,
    device: jax.Device,
    progress: bool,
    planes: bool = False,
) -> Stages:
    """Runs the checkpoint at `path`, Hugging Face's or converted, in float32 on `device`.

    Args:
      continuation: the judge's greedy tokens. Ours are the best ones behind the prompt and behind each of these.
      planes: give the pixels as one picture [C, H, W], not as patches [P, values] in the order that the tower takes.
    """
    model = open_model(path, dtype="float32", device=device)
    prepared = _prepare(model, prompt)
    (item,) = (ProcessedItem(item.plan, item.patches) for item in prepared.items)
    params = load_params(model, device=device, progress=progress)
    rows = ReferenceRunner(model.family, model.cfg, params, model.processor, device=device).encode(item)
    ids, positions, row_index = _with_continuation(prepared, continuation, len(rows))
    with jax.default_matmul_precision("highest"):
        layers, logits = jax.tree.map(
            np.asarray, _text(model.family, model.cfg, params["text"], rows, ids, row_index, positions)
        )
    length = len(prepared.token_ids)
    best = np.sort(logits[length - 1 :], axis=-1)[:, -2:]
    return Stages(
        token_ids=prepared.token_ids,
        positions=prepared.positions,
        pixels=_planes(item, model.processor) if planes else _pixels(item, model.processor.pixel_table()),
        tower=rows,
        layers=[layer[:length] for layer in layers],
        logits=logits[:length],
        greedy=logits[length - 1 :].argmax(-1),
        margins=best[:, 1] - best[:, 0],
    )


def _prepare(model: Model, prompt: VerifyPrompt) -> PreparedPrompt:
    with ThreadPoolExecutor(1) as media:
        frontend = Frontend(model, MultimodalConfig(), media)
        return frontend.chat(prompt.messages(with_pixels=True), InputOptions(), limit=None)


def _pixels(item: ProcessedItem, table: Float[np.ndarray, "C 256"]) -> Float[np.ndarray, "P values"]:
    """What the tower sees: every byte looked up in its channel's row of the table."""
    patches = item.patches.reshape(len(item.patches), len(table), -1)
    values = np.stack([table[channel][patches[:, channel]] for channel in range(len(table))], axis=1)
    return values.reshape(len(patches), -1)


def _planes(item: ProcessedItem, processor: Processor) -> Float[np.ndarray, "C H W"]:
    """The same as a picture: every patch at its row and column."""
    table, (_, rows, columns) = processor.pixel_table(), item.plan.grid
    side = math.isqrt(item.patches.shape[1] // len(table))
    places = processor.pack([item], exact_bucket(item.plan)).positions[: rows * columns]
    picture = np.empty((rows, columns, len(table), side, side), table.dtype)
    picture[tuple(places.T)] = _pixels(item, table)[: rows * columns].reshape(-1, len(table), side, side)
    return picture.transpose(2, 0, 3, 1, 4).reshape(len(table), rows * side, columns * side)


def _with_continuation(
    prompt: PreparedPrompt, continuation: Int[np.ndarray, "G"], num_rows: int
) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "A T"], Int[np.ndarray, "T"]]:
    """Token ids, rotary positions and pool rows of the prompt and all but the last token behind it."""
    fed = continuation[:-1].astype(np.int32)
    length = len(prompt.token_ids)
    ids = np.concatenate([prompt.token_ids, fed])
    tail = np.arange(length, len(ids), dtype=np.int32) + np.int32(prompt.position_delta)
    positions = np.concatenate([prompt.positions, np.tile(tail, (len(prompt.positions), 1))], axis=1)
    row_index = np.full(len(ids), num_rows, np.int32)
    row_index[prompt.items[0].row_positions] = np.arange(num_rows)
    ids[row_index < num_rows] = 0  # a placeholder need not be in the vocabulary
    return ids, positions, row_index


@partial(jax.jit, static_argnums=(0, 1))
def _text(family, cfg, params, rows, ids, row_index, positions):
    hidden, deepstack, tokens = embed_tokens(family, cfg, params, rows, ids, row_index)
    arguments = (params, cfg, hidden, positions, ((),) * cfg.num_layers, None, reference_attention(), deepstack, tokens)
    layers, _ = family.layer_outputs(*arguments)
    final, _ = family.forward(*arguments)
    return layers, family.logits(params, cfg, final)
