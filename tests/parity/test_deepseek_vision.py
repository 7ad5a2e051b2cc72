# SPDX-License-Identifier: Apache-2.0
"""Claim: pixels, packing and tower of DeepSeek-V4.1 compute what its description says, whatever shares the batch."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from deepseek_tower import picture_rows
from llm_kit import noise
from PIL import Image
from safetensors.numpy import load_file, save_file
from tolerances import OTHER_LAYOUT, TOWER_ROWS

from conversion.loader import load_params
from kernels_pallas.dispatch import reference_vision_ops, vision_ops
from mmjax.errors import CheckpointError, EngineError, RequestError
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey, Modality
from mmjax.models.deepseek_v4_1 import FAMILY
from mmjax.models.deepseek_v4_1.grid import Grid
from mmjax.models.deepseek_v4_1.inputs import vision_input_shapes
from mmjax.models.deepseek_v4_1.pixels import byte_table, fit, patches

SIZES = ((56, 84), (70, 98), (150, 20), (28, 28), (300, 500))  # height, width


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint("deepseek_v4_1")


@pytest.fixture(scope="module")
def config(checkpoint):
    return FAMILY.config(json.loads((checkpoint.path / "config.json").read_text()))


@pytest.fixture(scope="module")
def processor(checkpoint, config):
    return FAMILY.processor(config, checkpoint.path)


@pytest.fixture(scope="module")
def params(checkpoint, config):
    return load_params(checkpoint.path, FAMILY, config, progress=False)["vision"]


def by_hand(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resized to fit and pasted in the middle of grey, as the description words it."""
    rows, columns = rgb.shape[:2]
    image = Image.fromarray(rgb)
    if columns / rows > width / height:
        fitted, corner = (width, round(rows / columns * width)), None
        corner = (0, round((height - fitted[1]) / 2))
    else:
        fitted = (round(columns / rows * height), height)
        corner = (round((width - fitted[0]) / 2), 0)
    out = Image.new("RGB", (width, height), (127, 127, 127))
    out.paste(image.resize(fitted, Image.Resampling.BICUBIC), corner)
    return np.asarray(out)


# ---- pixels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pictures_keep_their_shape_on_grey(processor, size):
    rgb = noise(*size)
    plan = processor.plan_image(*size, {})
    grid = Grid(*plan.grid[1:], 3)
    assert np.array_equal(fit(rgb, grid, processor.rule), by_hand(rgb, grid.height * 14, grid.width * 14))


def test_too_flat_pictures_are_squeezed(processor):
    rule = replace(processor.rule, max_ratio=2.0)
    rgb, grid = noise(20, 200), Grid(4, 8, 3)
    expected = np.asarray(Image.fromarray(rgb).resize((8 * 14, 4 * 14)))
    assert np.array_equal(fit(rgb, grid, rule), expected)
    assert not np.array_equal(fit(rgb, grid, replace(rule, max_ratio=11.0)), expected)


def test_patches_lie_channel_first(processor):
    rgb, grid = noise(28, 42), Grid(2, 3, 3)
    found = patches(rgb, grid, processor.rule)
    assert found.shape == (6, 588)
    assert np.array_equal(found[4].reshape(3, 14, 14), rgb[14:28, 14:28].transpose(2, 0, 1))


def test_bytes_become_values_around_zero():
    expected = (torch.arange(256, dtype=torch.float32) / 255 - 0.5) / 0.5
    assert np.array_equal(byte_table(), expected.numpy()[None].repeat(3, 0))


def test_a_picture_too_thin_to_be_seen_is_refused(processor):
    with pytest.raises(RequestError, match="1 x 90000 pixels"):
        processor.image(noise(1, 90000), {})


# ---- plans --------------------------------------------------------------------------------------------------------


def test_a_span_is_rows_of_one_id(processor, config):
    plan = processor.plan_image(70, 98, {})
    assert plan.grid == (1, 5, 7)
    assert plan.rows == len(plan.span_ids) == 2 * (3 + 1) + 2
    assert set(plan.span_ids.tolist()) == {config.image_token_id}
    assert plan.span_embed.all()
    assert plan.contexts == (35,)


def test_other_media_and_options_are_refused(processor):
    with pytest.raises(RequestError, match="images, not video"):
        processor.resolve(Modality.VIDEO, {})
    with pytest.raises(RequestError, match="no processor options, got max_pixels"):
        processor.plan_image(56, 56, {"max_pixels": 3136})


def test_another_id_of_the_placeholder_is_refused(checkpoint, config):
    with pytest.raises(CheckpointError, match=r"is 264, config\.json says image_token_id 7"):
        FAMILY.processor(replace(config, image_token_id=7), checkpoint.path)


# ---- tower --------------------------------------------------------------------------------------------------------


def encoded(params, config, processor, items, bucket, ops) -> np.ndarray:
    packed = processor.pack(items, bucket)
    shapes = vision_input_shapes(config, bucket)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), packed) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    encode = jax.jit(FAMILY.encode, static_argnums=(1, 4))
    return np.asarray(encode(params, config, packed, processor.pixel_table(), ops))


@pytest.fixture(scope="module")
def items(processor):
    return [processor.image(noise(*size, seed=i), {}) for i, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def expected(checkpoint, processor):
    tensors = {name: torch.from_numpy(x.copy()) for name, x in load_file(checkpoint.path / "model.safetensors").items()}
    vision = json.loads((checkpoint.path / "config.json").read_text())["vision_config"]
    rows = []
    for i, size in enumerate(SIZES):
        grid = Grid(*processor.plan_image(*size, {}).grid[1:], 3)
        pixels = by_hand(noise(*size, seed=i), grid.height * 14, grid.width * 14)
        rows.append(picture_rows(tensors, torch.from_numpy(pixels.copy()), vision).numpy())
    return rows


def test_rows_of_a_picture_alone(params, config, processor, items, expected, parity_record):
    for item, rows in zip(items, expected, strict=True):
        bucket = EncoderBucket(EncoderGraphKey(item.plan.encoder_tokens, 1), 0, item.plan.rows)
        found = encoded(params, config, processor, [item], bucket, reference_vision_ops())
        assert found.shape == rows.shape
        np.testing.assert_allclose(found, rows, rtol=0, atol=TOWER_ROWS)
        parity_record.difference(FAMILY.name, "rows", found, rows)


def test_rows_of_a_padded_batch(params, config, processor, items, expected):
    tokens = sum(item.plan.encoder_tokens for item in items) + 37
    bucket = EncoderBucket(EncoderGraphKey(tokens, 8), 0, processor.max_rows(tokens))
    found = encoded(params, config, processor, items, bucket, vision_ops("cpu"))
    rows = np.concatenate(expected)
    np.testing.assert_allclose(found[: len(rows)], rows, rtol=0, atol=TOWER_ROWS)
    assert np.isfinite(found).all()
    reversed_rows = encoded(params, config, processor, items[::-1], bucket, vision_ops("cpu"))[: len(rows)]
    parts = np.split(reversed_rows, np.cumsum([len(part) for part in expected[::-1]])[:-1])
    np.testing.assert_allclose(np.concatenate(parts[::-1]), found[: len(rows)], rtol=0, atol=OTHER_LAYOUT)


def test_padding_may_hold_anything(params, config, processor, items):
    bucket = EncoderBucket(EncoderGraphKey(400, 4), 0, 300)
    encode = jax.jit(FAMILY.encode, static_argnums=(1, 4))
    packed = processor.pack(items[:3], bucket)
    table = processor.pixel_table()
    clean = np.asarray(encode(params, config, packed, table, vision_ops("cpu")))
    count, rows = int(packed.num_patches), sum(item.plan.rows for item in items[:3])
    used = np.unique(packed.patches[:count])
    hole = next(byte for byte in range(256) if byte not in used) if len(used) < 256 else None
    dirty = packed.replace(patches=packed.patches.copy(), positions=packed.positions.copy())
    dirty.patches[count:] = 255 if hole is None else hole
    dirty.positions[count:] = 10_000
    if hole is not None:
        table = table.copy()
        table[:, hole] = np.nan
    found = np.asarray(encode(params, config, dirty, table, vision_ops("cpu")))
    assert np.array_equal(found[:rows], clean[:rows])


def test_what_exceeds_a_bucket_is_an_engine_error(processor, items):
    needed = items[0].plan.encoder_tokens
    with pytest.raises(EngineError, match=f"1 pictures need {needed} patches; the encoder bucket holds {needed - 1}"):
        processor.pack(items[:1], EncoderBucket(EncoderGraphKey(needed - 1, 1), 0, 64))


# ---- weights ------------------------------------------------------------------------------------------------------


def test_all_that_is_missing_or_misshapen_is_listed(checkpoint, config, tmp_path):
    tensors = load_file(checkpoint.path / "model.safetensors")
    del tensors["image_newline"], tensors["vision.blocks.1.attn.wqkv.bias"]
    tensors["aligner.w1.weight"] = tensors["aligner.w1.weight"][:, :-9].copy()
    for file in checkpoint.path.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_params(tmp_path, FAMILY, config, progress=False)
    for part in ("2 missing", "image_newline", "vision.blocks.1.attn.wqkv.bias", "1 misshaped", "aligner.w1.weight"):
        assert part in str(error.value)


def test_norms_stay_float32_in_a_bfloat16_model(config):
    spec = FAMILY.spec(replace(config, dtype="bfloat16"))
    assert str(spec["vision"]["vectors"]["norm1"].dtype) == str(spec["vision"]["norm"].dtype) == "float32"
    assert str(spec["vision"]["blocks"][0]["qkv"].dtype) == "bfloat16"
