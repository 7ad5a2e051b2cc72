# SPDX-License-Identifier: Apache-2.0
"""Claim: towers and decoder compute what transformers computes, layer by layer, on the same random weights."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
import torch
from qwen_kit import CASES, REFERENCE_OPS, media_of, noise, pack, reference_inputs
from qwen_kit import ours as ours_of

from kernels_pallas.dispatch import reference_attention, vision_ops
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey
from mmjax.layers.fusion import gather_embeds
from mmjax.models.decoder import text

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def reference_rows(model, inputs) -> np.ndarray:
    """transformers' tower on each kind of media, images first; deepstack levels stand behind the main rows."""
    rows = []
    with torch.no_grad():
        for pixels, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
            if pixels in inputs:
                output = model.model.visual(inputs[pixels].to(model.dtype), grid_thw=inputs[grid])
                levels = getattr(output, "deepstack_features", None) or []
                rows.append(torch.cat([output.pooler_output, *levels], dim=-1).float().numpy())
    return np.concatenate(rows)


def reference_text(model, inputs) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """transformers' hidden states around every layer (L + 1 arrays), its logits and its positions [3, T]."""
    keys = (
        "input_ids",
        "mm_token_type_ids",
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
        "attention_mask",
    )
    hidden: list[np.ndarray] = []

    def keep(module, args, kwargs) -> None:
        hidden.append((args[0] if args else kwargs["hidden_states"])[0].float().numpy().copy())

    # Inputs and not outputs: deepstack rows are added between two layers.
    decoder = model.get_decoder()
    hooks = [part.register_forward_pre_hook(keep, with_kwargs=True) for part in (*decoder.layers, decoder.norm)]
    with torch.no_grad():
        positions, _ = model.model.get_rope_index(**{key: inputs[key] for key in keys if key in inputs})
        output = model(**inputs, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    return hidden, output.logits[0].float().numpy(), positions[:, 0].numpy().astype(np.int32)


def text_arguments(inputs, rows: np.ndarray, positions: np.ndarray) -> tuple:
    """ids (0 where a row goes), row indices, the pool and positions, as the engine would hand them over."""
    ids = inputs["input_ids"][0].numpy().astype(np.int32)
    is_row = inputs["mm_token_type_ids"][0].numpy() > 0
    order = np.argsort(inputs["mm_token_type_ids"][0].numpy()[is_row], kind="stable")
    row_index = np.full(len(ids), max(1, len(rows)), np.int32)
    row_index[np.flatnonzero(is_row)[order]] = np.arange(is_row.sum())
    pool = rows if len(rows) else np.full((1, rows.shape[1]), np.nan, np.float32)
    return np.where(is_row, 0, ids), row_index, pool, positions


@pytest.mark.parametrize(
    ("case", "ops"), [("images", REFERENCE_OPS), ("mixed", vision_ops("cpu"))], ids=["images-reference", "mixed-xla"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_tower_gives_the_reference_rows(tiny_checkpoint, parity_record, family, case, ops):
    checkpoint = tiny_checkpoint(family)
    ours = ours_of(checkpoint)
    inputs = reference_inputs(checkpoint, CASES[case])
    patches, grids = media_of(inputs, ours.table)
    rows, expected = ours.rows(pack(patches, grids, ours.cfg), ops), reference_rows(checkpoint.model, inputs)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerances.TOWER_ROWS)
    parity_record.difference(family, "rows", rows, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_processor_feeds_the_tower_the_same(tiny_checkpoint, family):
    """Through mmjax's own resizing, packing and byte table, into a bucket with room to spare."""
    checkpoint = tiny_checkpoint(family)
    ours = ours_of(checkpoint)
    processor = ours.family.processor(ours.cfg, checkpoint.path)
    items = [processor.image(noise((*size, 3), i), {}) for i, size in enumerate(CASES["images"].images)]
    total = sum(item.plan.encoder_tokens for item in items) + 8
    windows = sum(item.plan.windows for item in items) + (2 if ours.cfg.window_capacity else 0)
    bucket = EncoderBucket(EncoderGraphKey(total, 5), windows, total // ours.cfg.merge)
    packed = processor.pack(items, bucket)
    shapes = ours.family.vision_inputs(ours.cfg, bucket)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), packed) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    np.testing.assert_array_equal(processor.pixel_table(), ours.table)
    expected = reference_rows(checkpoint.model, reference_inputs(checkpoint, CASES["images"]))
    rows = ours.rows(packed, vision_ops("cpu"))[: len(expected)]
    np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerances.TOWER_ROWS)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_and_the_logits_match(tiny_checkpoint, parity_record, family, case):
    checkpoint = tiny_checkpoint(family)
    ours = ours_of(checkpoint)
    inputs = reference_inputs(checkpoint, CASES[case])
    hidden, logits, positions = reference_text(checkpoint.model, inputs)
    rows = np.zeros((0, ours.cfg.row_width), np.float32)
    if CASES[case].images:
        rows = ours.rows(pack(*media_of(inputs, ours.table), ours.cfg))
    around, our_logits = ours.layers_and_logits(text.layer_outputs, *text_arguments(inputs, rows, positions))
    assert len(around) == ours.cfg.num_layers + 1
    for i, expected in enumerate(hidden):
        np.testing.assert_allclose(around[i], expected, rtol=0, atol=tolerances.LOGITS, err_msg=f"before layer {i}")
    np.testing.assert_allclose(our_logits, logits, rtol=0, atol=tolerances.LOGITS)
    assert np.abs(logits).max() > 1.0  # far above the tolerance
    parity_record.difference(family, "logits", our_logits, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_mlp_width_changes_nothing(tiny_checkpoint, family):
    """544 is no multiple of 64: both MLPs load with 576 columns, the last 32 of them zero."""
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=1, mlp=544, vision_mlp=544)
    ours = ours_of(checkpoint)
    assert (ours.cfg.text.mlp_width, ours.cfg.vision.mlp_width) == (576, 576)
    assert ours.params["text"]["layers"][0]["down"].shape == (64, 576)
    inputs = reference_inputs(checkpoint, CASES["image"])
    rows = ours.rows(pack(*media_of(inputs, ours.table), ours.cfg))
    np.testing.assert_allclose(rows, reference_rows(checkpoint.model, inputs), rtol=0, atol=tolerances.TOWER_ROWS)
    _, logits, positions = reference_text(checkpoint.model, inputs)
    _, our_logits = ours.layers_and_logits(text.layer_outputs, *text_arguments(inputs, rows, positions))
    np.testing.assert_allclose(our_logits, logits, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_head_is_the_embedding(tiny_checkpoint, family):
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=1, tie=True)
    ours = ours_of(checkpoint)
    assert "lm_head" not in ours.params["text"]
    inputs = reference_inputs(checkpoint, CASES["text"])
    _, logits, positions = reference_text(checkpoint.model, inputs)
    rows = np.zeros((0, ours.cfg.row_width), np.float32)
    _, our_logits = ours.layers_and_logits(text.layer_outputs, *text_arguments(inputs, rows, positions))
    np.testing.assert_allclose(our_logits, logits, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize("ops", [REFERENCE_OPS, vision_ops("cpu")], ids=["reference", "xla"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_never_reaches_real_rows(tiny_checkpoint, family, ops):
    checkpoint = tiny_checkpoint(family)
    ours = ours_of(checkpoint)
    patches, grids = media_of(reference_inputs(checkpoint, CASES["image"]), ours.table)
    real = len(patches) // ours.cfg.merge
    exact = ours.rows(pack(patches, grids, ours.cfg), ops)
    padded = [ours.rows(pack(patches, grids, ours.cfg, extra=12, garbage=g), ops)[:real] for g in (0, 255)]
    np.testing.assert_array_equal(padded[0], padded[1])
    np.testing.assert_allclose(padded[0], exact, rtol=0, atol=tolerances.OTHER_LAYOUT)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_errs_no_more_than_the_reference(tiny_checkpoint, family):
    checkpoint = tiny_checkpoint(family)
    inputs = reference_inputs(checkpoint, CASES["image"])
    exact_rows = reference_rows(checkpoint.model, inputs)
    _, exact_logits, positions = reference_text(checkpoint.model, inputs)
    low = (
        type(checkpoint.model)
        .from_pretrained(checkpoint.path, dtype=torch.bfloat16, attn_implementation="eager")
        .eval()
    )
    their_rows = reference_rows(low, inputs)
    _, their_logits, _ = reference_text(low, inputs)

    ours = ours_of(checkpoint, "bfloat16")
    rows = ours.rows(pack(*media_of(inputs, ours.table), ours.cfg))
    _, logits = ours.layers_and_logits(text.layer_outputs, *text_arguments(inputs, rows, positions))
    for mine, theirs, exact in ((rows, their_rows, exact_rows), (logits, their_logits, exact_logits)):
        error, allowed = (np.sqrt(np.mean((x - exact) ** 2)) for x in (mine, theirs))
        assert error <= tolerances.BF16_ERROR_RATIO * allowed


def test_deepstack_rows_are_added_after_their_layers(tiny_checkpoint):
    ours = ours_of(tiny_checkpoint("qwen2_5_vl"))
    cfg = replace(ours.cfg, text=replace(ours.cfg.text, deepstack_layers=(0, 2)))
    assert cfg.row_width == 3 * cfg.hidden_size
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((5, 64), np.float32)
    levels = rng.standard_normal((2, 5, 64), np.float32)
    positions = np.tile(np.arange(5, dtype=np.int32), (3, 1))
    params, kv = ours.params["text"], ((),) * 3

    def around(config, start, deepstack=None):
        states, _ = text.layer_outputs(params, config, start, positions, kv, None, reference_attention(), deepstack)
        return states

    stacked = around(cfg, hidden, levels)
    after_first = around(ours.cfg, hidden)[1] + levels[0]
    np.testing.assert_allclose(stacked[1], after_first, rtol=0, atol=tolerances.OTHER_LAYOUT)
    # The middle layer adds nothing; its output follows from the changed input alone.
    middle = {**params, "layers": params["layers"][1:], "vectors": jax.tree.map(lambda x: x[1:], params["vectors"])}
    plain, _ = text.layer_outputs(middle, ours.cfg, stacked[1], positions, kv, None, reference_attention())
    np.testing.assert_allclose(stacked[2], plain[1], rtol=0, atol=tolerances.OTHER_LAYOUT)
    np.testing.assert_allclose(stacked[3], plain[2] + levels[1], rtol=0, atol=tolerances.OTHER_LAYOUT)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_parameter(tiny_checkpoint, family):
    checkpoint = tiny_checkpoint(family, layers=2, vision_depth=2)
    ours = ours_of(checkpoint)
    packed = pack(*media_of(reference_inputs(checkpoint, CASES["image"]), ours.table), ours.cfg)

    def loss(params):
        rows = ours.family.encode(params["vision"], ours.cfg, packed, ours.table, vision_ops("cpu"))
        row_index = jnp.arange(-1, len(rows)) % (len(rows) + 1)  # one text token, then every row
        ids = jnp.where(row_index < len(rows), 0, 3)
        hidden, deepstack = gather_embeds(params["text"]["embed"], ids, rows, row_index)
        positions = jnp.tile(jnp.arange(len(ids)), (3, 1))
        rest = (((),) * ours.cfg.num_layers, None, reference_attention(), deepstack)
        hidden, _ = ours.family.forward(params["text"], ours.cfg, hidden, positions, *rest)
        return jnp.square(ours.family.logits(params["text"], ours.cfg, hidden)).mean()

    gradients = jax.jit(jax.grad(loss))(ours.params)
    for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path
