# SPDX-License-Identifier: Apache-2.0
"""Claim: families with a Pixtral tower compute what transformers computes: rows, decoder input, every layer, logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
import torch
from mistral_kit import PICTURES, TOWERS, pack, pictures, reference_inputs, reference_rows
from qwen_kit import REFERENCE_OPS
from qwen_kit import ours as ours_of

from kernels_pallas.dispatch import reference_attention, vision_ops
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey
from mmjax.models.decoder import text

CASES = {
    "text": ("<s>[INST]How old is the moon?[/INST]", ()),
    "picture": ("<s>[INST][IMG]Describe.[/INST]", PICTURES[:1]),
    "pictures": ("<s>[INST][IMG][IMG] and [IMG], or [IMG]?[/INST]", PICTURES),
}


def case_inputs(checkpoint, case: str):
    prompt, sizes = CASES[case]
    return reference_inputs(checkpoint, prompt, pictures(sizes))


def reference_text(model, inputs) -> tuple[list[np.ndarray], np.ndarray]:
    """transformers' hidden states around every layer, and its logits."""
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True, use_cache=False)
    return [state[0].float().numpy() for state in output.hidden_states], output.logits[0].float().numpy()


def text_arguments(checkpoint, inputs, rows: np.ndarray) -> tuple:
    """ids (0 where a row goes), row indices, the pool and positions, as the engine would hand them over."""
    ids = inputs["input_ids"][0].numpy().astype(np.int32)
    is_row = ids == checkpoint.processor.image_token_id
    row_index = np.where(is_row, np.cumsum(is_row) - 1, max(1, len(rows))).astype(np.int32)
    pool = rows if len(rows) else np.full((1, 64), np.nan, np.float32)
    return np.where(is_row, 0, ids), row_index, pool, np.arange(len(ids), dtype=np.int32)[None]


def all_rows(ours, family: str, inputs) -> np.ndarray:
    return ours.rows(pack(family, inputs, ours.table)) if "pixel_values" in inputs else np.zeros((0, 64), np.float32)


@pytest.mark.parametrize("ops", [REFERENCE_OPS, vision_ops("cpu")], ids=["reference", "xla"])
@pytest.mark.parametrize("family", TOWERS)
def test_tower_gives_the_reference_rows(tiny_checkpoint, parity_record, family, ops):
    checkpoint = tiny_checkpoint(family)
    ours, inputs = ours_of(checkpoint), case_inputs(checkpoint, "pictures")
    expected = np.concatenate(reference_rows(checkpoint.model, inputs))
    rows = ours.rows(pack(family, inputs, ours.table), ops)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerances.TOWER_ROWS)
    assert np.abs(expected).max() > 0.1
    parity_record.difference(family, "rows", rows, expected)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral3", {"projector_bias": True, "hidden_act": "gelu"}),
        ("pixtral", {"projector_bias": False, "hidden_act": "gelu"}),
        ("lighton_ocr", {"vision_mlp": 544}),
        ("mistral3", {"vision_mlp": 544}),  # loads with 576 columns, the last 32 of them zero
    ],
    ids=str,
)
def test_other_towers_give_the_reference_rows(tiny_checkpoint, family, options):
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=1, **options)
    ours, inputs = ours_of(checkpoint), case_inputs(checkpoint, "picture")
    rows = ours.rows(pack(family, inputs, ours.table))
    expected = np.concatenate(reference_rows(checkpoint.model, inputs))
    np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerances.TOWER_ROWS)


@pytest.mark.parametrize("family", TOWERS)
def test_the_processor_feeds_the_tower_the_same(tiny_checkpoint, family):
    """Through mmjax's own resizing, packing and byte table, into a bucket with room to spare."""
    checkpoint = tiny_checkpoint(family)
    ours = ours_of(checkpoint)
    processor = ours.family.processor(ours.cfg, checkpoint.path)
    items = [processor.image(picture, {}) for picture in pictures()]
    total = sum(item.plan.encoder_tokens for item in items) + 8
    bucket = EncoderBucket(EncoderGraphKey(total, 7), 0, total // ours.cfg.merge)
    packed = processor.pack(items, bucket)
    shapes = ours.family.vision_inputs(ours.cfg, bucket)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), packed) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    np.testing.assert_array_equal(processor.pixel_table(), ours.table)
    expected = reference_rows(checkpoint.model, case_inputs(checkpoint, "pictures"))
    assert [item.plan.rows for item in items] == [len(rows) for rows in expected]
    rows = ours.rows(packed, vision_ops("cpu"))[: sum(map(len, expected))]
    np.testing.assert_allclose(rows, np.concatenate(expected), rtol=0, atol=tolerances.TOWER_ROWS)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("family", TOWERS)
def test_every_layer_and_the_logits_match(tiny_checkpoint, parity_record, family, case):
    checkpoint = tiny_checkpoint(family)
    ours, inputs = ours_of(checkpoint), case_inputs(checkpoint, case)
    hidden, logits = reference_text(checkpoint.model, inputs)
    arguments = text_arguments(checkpoint, inputs, all_rows(ours, family, inputs))
    around, our_logits = ours.layers_and_logits(text.layer_outputs, *arguments)
    assert len(around) == ours.cfg.num_layers + 1
    # The first is the fused input; transformers stores the last state after the final norm, which the logits cover.
    for i, expected in enumerate(hidden[:-1]):
        np.testing.assert_allclose(around[i], expected, rtol=0, atol=tolerances.LOGITS, err_msg=f"before layer {i}")
    np.testing.assert_allclose(our_logits, logits, rtol=0, atol=tolerances.LOGITS)
    assert np.abs(logits).max() > 1.0  # far above the tolerance
    parity_record.difference(family, "logits", our_logits, logits)


@pytest.mark.parametrize("family", TOWERS)
def test_tied_head_is_the_embedding(tiny_checkpoint, family):
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=1, tie=True)
    ours, inputs = ours_of(checkpoint), case_inputs(checkpoint, "text")
    assert "lm_head" not in ours.params["text"]
    _, logits = reference_text(checkpoint.model, inputs)
    _, our_logits = ours.layers_and_logits(
        text.layer_outputs, *text_arguments(checkpoint, inputs, np.zeros((0, 64), np.float32))
    )
    np.testing.assert_allclose(our_logits, logits, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize("ops", [REFERENCE_OPS, vision_ops("cpu")], ids=["reference", "xla"])
@pytest.mark.parametrize("family", TOWERS)
def test_padding_never_reaches_real_rows(tiny_checkpoint, family, ops):
    checkpoint = tiny_checkpoint(family)
    ours, inputs = ours_of(checkpoint), case_inputs(checkpoint, "picture")
    exact = ours.rows(pack(family, inputs, ours.table), ops)
    padded = [ours.rows(pack(family, inputs, ours.table, extra=12, garbage=g), ops)[: len(exact)] for g in (0, 255)]
    np.testing.assert_array_equal(padded[0], padded[1])
    np.testing.assert_allclose(padded[0], exact, rtol=0, atol=tolerances.OTHER_LAYOUT)


@pytest.mark.parametrize("family", TOWERS)
def test_bfloat16_errs_no_more_than_the_reference(tiny_checkpoint, family):
    checkpoint = tiny_checkpoint(family)
    inputs = case_inputs(checkpoint, "picture")
    exact_rows = np.concatenate(reference_rows(checkpoint.model, inputs))
    _, exact_logits = reference_text(checkpoint.model, inputs)
    low = (
        type(checkpoint.model)
        .from_pretrained(checkpoint.path, dtype=torch.bfloat16, attn_implementation="eager")
        .eval()
    )
    their_rows = np.concatenate(reference_rows(low, inputs))
    _, their_logits = reference_text(low, inputs)
    ours = ours_of(checkpoint, "bfloat16")
    rows = all_rows(ours, family, inputs)
    _, logits = ours.layers_and_logits(text.layer_outputs, *text_arguments(checkpoint, inputs, rows))
    for mine, theirs, exact in ((rows, their_rows, exact_rows), (logits, their_logits, exact_logits)):
        error, allowed = (np.sqrt(np.mean((x - exact) ** 2)) for x in (mine, theirs))
        assert error <= tolerances.BF16_ERROR_RATIO * allowed


@pytest.mark.parametrize("family", TOWERS)
def test_gradients_reach_every_parameter(tiny_checkpoint, family):
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=2)
    ours = ours_of(checkpoint)
    packed = pack(family, case_inputs(checkpoint, "picture"), ours.table)

    def loss(params):
        rows = ours.family.encode(params["vision"], ours.cfg, packed, ours.table, vision_ops("cpu"))
        hidden = jnp.concatenate([ours.family.embed(params["text"], ours.cfg, jnp.array([3])), rows])
        positions = jnp.arange(len(hidden))[None]
        hidden, _ = ours.family.forward(params["text"], ours.cfg, hidden, positions, ((),), None, reference_attention())
        return jnp.square(ours.family.logits(params["text"], ours.cfg, hidden)).mean()

    gradients = jax.jit(jax.grad(loss))(ours.params)
    for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path
