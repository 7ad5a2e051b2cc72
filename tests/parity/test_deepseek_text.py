# SPDX-License-Identifier: Apache-2.0
"""Claim: the decoder of DeepSeek-V4.1 is transformers' DeepSeek-V4, with the routing that pictures ask for."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
import torch
import transformers
from deepseek_judge import DeepseekJudge
from deepseek_tower import picture_rows
from llm_kit import CHECKPOINT, build, noise, serving, user
from safetensors.torch import load_file

import mmjax
from conversion.loader import load_params
from conversion.orbax_io import convert
from kernels_pallas.dispatch import reference_attention
from mmjax.encoder.runner import EncoderRunner
from mmjax.errors import CheckpointError, RequestError
from mmjax.layers.fusion import StepTokens
from mmjax.loading import open_model
from mmjax.models.deepseek_v4_1 import FAMILY
from mmjax.models.deepseek_v4_1.grid import Grid
from mmjax.models.deepseek_v4_1.pixels import fit

FAMILY_NAME = "deepseek_v4_1"
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint(FAMILY_NAME, **CHECKPOINT)


@pytest.fixture(scope="module")
def hf(checkpoint):
    return json.loads((checkpoint.path / "config.json").read_text())


@pytest.fixture(scope="module")
def judge(checkpoint):
    return DeepseekJudge(checkpoint)


@pytest.fixture(scope="module")
def ours(checkpoint, hf):
    """A function (ids, rows, their positions) -> streams around the layers, logits."""
    cfg = FAMILY.config(hf)
    params = load_params(checkpoint.path, FAMILY, cfg, progress=False)["text"]

    @jax.jit
    def run(ids, hidden, is_row):
        step = (hidden, jnp.arange(len(ids))[None], ((),) * cfg.num_layers, None, reference_attention(), None)
        tokens = StepTokens(ids, is_row)
        around, _ = FAMILY.layer_outputs(params, cfg, *step, tokens)
        final, _ = FAMILY.forward(params, cfg, *step, tokens)
        return around, FAMILY.logits(params, cfg, final)

    def call(ids, rows=None, at=()):
        ids, is_row = np.array(ids, np.int32), np.zeros(len(ids), bool)
        hidden = np.array(FAMILY.embed(params, cfg, ids))
        if rows is not None:
            hidden[list(at)], ids[list(at)], is_row[list(at)] = rows, 0, True
        around, logits = run(ids, hidden, is_row)
        return [np.asarray(x) for x in around], np.asarray(logits)

    return call


def text_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


# Below, at and beyond the window of 12, the entries of 4 and 8 tokens, and the 3 entries that a token may pick.
@pytest.mark.parametrize("length", [5, 150])
def test_every_layer_and_the_logits(judge, ours, parity_record, length):
    layers, logits = judge.run(text_ids(length))
    around, found = ours(text_ids(length))
    assert len(around) == len(layers) + 1
    for mine, theirs in zip(around[1:], layers, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerances.LOGITS)
    np.testing.assert_allclose(found, logits, rtol=0, atol=tolerances.LOGITS)
    assert np.abs(logits).max() > 1  # far above the tolerance
    parity_record.difference(FAMILY_NAME, "logits", found, logits)


def test_pictures_route_by_a_bias_of_their_own(judge, ours, hf):
    at = [*range(4, 20), *range(30, 41)]
    ids = text_ids(150, seed=1)
    for position in at:
        ids[position] = hf["image_token_id"]
    rows = np.random.default_rng(2).normal(size=(len(at), hf["text_config"]["hidden_size"])).astype(np.float32)
    _, logits = judge.run(ids, rows, at)
    _, found = ours(ids, rows, at)
    np.testing.assert_allclose(found, logits, rtol=0, atol=tolerances.LOGITS)
    judge_without_bias = DeepseekJudge.__new__(DeepseekJudge)
    judge_without_bias.model, judge_without_bias._bias = judge.model, {}
    assert np.abs(judge_without_bias.run(ids, rows, at)[1] - logits).max() > 100 * tolerances.LOGITS


def test_a_checkpoint_without_that_bias(tiny_checkpoint):
    plain = tiny_checkpoint(FAMILY_NAME, vision_bias=False, **CHECKPOINT)
    cfg = FAMILY.config(json.loads((plain.path / "config.json").read_text()))
    assert not cfg.text.vision_bias
    assert "vision_bias" not in load_params(plain.path, FAMILY, cfg, progress=False)["text"]["layers"][1]


# ---- through the engine -------------------------------------------------------------------------------------------


def check_tokens(tokens: list[int], expected: list[int], margins: np.ndarray) -> bool:
    """Equal, or different from a near tie on; returns whether there is one."""
    differing = [mine != theirs for mine, theirs in zip(tokens, expected, strict=True)]
    if any(differing):
        assert margins[differing.index(True)] < tolerances.TIE, (tokens, expected)
    return any(differing)


GREEDY = mmjax.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def test_the_engine_answers_as_transformers_does(tiny_llm, judge, checkpoint, hf, parity_record):
    pictures = [noise(84, 140, 1), noise(200, 60, 2)]
    messages = user("see: ", pictures[0], "and then", pictures[1], "which of them is it, and why?" * 3)
    with serving(tiny_llm(FAMILY_NAME), chunk_tokens=24) as llm:
        out = llm.chat(messages, GREEDY)
        processor, banned = llm.model.processor, llm.model.processor.never_sampled
    tensors, rows = load_file(checkpoint.path / "model.safetensors"), []
    for picture in pictures:
        grid = Grid(*processor.plan_image(*picture.shape[:2], {}).grid[1:], 3)
        pixels = torch.from_numpy(fit(picture, grid, processor.rule).copy())
        rows.append(picture_rows(tensors, pixels, hf["vision_config"]).numpy())
    ids = list(out.prompt_token_ids)
    at = [position for position, token in enumerate(ids) if token == hf["image_token_id"]]
    assert len(at) == sum(map(len, rows))
    expected, margins = judge.greedy(ids, NEW_TOKENS, banned, np.concatenate(rows), at)
    parity_record.greedy(FAMILY_NAME, NEW_TOKENS, check_tokens(out.token_ids, expected, margins))


def test_text_alone_answers_as_transformers_with_its_cache_does(tiny_llm, judge, parity_record):
    with serving(tiny_llm(FAMILY_NAME), chunk_tokens=24) as llm:
        out = llm.chat(user("How old is the moon? " * 6), GREEDY)
        banned = llm.model.processor.never_sampled
    ids = torch.tensor([list(out.prompt_token_ids)])
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        suppress_tokens=list(banned),
        eos_token_id=judge.model.config.vocab_size,  # no token: the answer never ends
        pad_token_id=0,
    )
    answer = judge.model.generate(ids, generation_config=config, output_logits=True, return_dict_in_generate=True)
    logits = np.delete(torch.cat(answer.logits).numpy(), list(banned), axis=1)
    best = np.sort(logits, axis=1)[:, -2:]
    theirs = answer.sequences[0, ids.shape[1] :].tolist()
    ties = check_tokens(out.token_ids, theirs, best[:, 1] - best[:, 0])
    parity_record.greedy(FAMILY_NAME, NEW_TOKENS, ties)


# ---- configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_nextn_predict_layers", 1),
        ("engram_layers", [1]),
        ("dspark", {"k": 4}),
        ("n_shared_experts", 2),
        ("num_key_value_heads", 2),
        ("tie_word_embeddings", True),
        ("layer_types", ["full_attention"] * 3),
        ("scoring_func", "relu"),
    ],
)
def test_what_the_decoder_lacks_is_refused(hf, key, value):
    with pytest.raises(CheckpointError, match=f"text_config.{key}"):
        FAMILY.config(hf | {"text_config": hf["text_config"] | {key: value}})


def test_keys_of_published_checkpoints(hf):
    """DeepSeek's own names for what transformers calls otherwise."""
    text = dict(hf["text_config"])
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"):
        text.pop(key, None)
    text |= {
        "compress_ratios": [0, 4, 128, 0],
        "num_hash_layers": 1,
        "qk_rope_head_dim": 8,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512},
    }
    published, known = FAMILY.config(hf | {"text_config": text}), FAMILY.config(hf)
    assert published.text == replace(known.text, heavy_rate=128)


def test_defaults_of_the_tower(hf):
    config = FAMILY.config({key: value for key, value in hf.items() if key != "vision_config"})
    vision = config.vision
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size) == (32, 1024, 16, 2816)
    assert (vision.patch_values, vision.head_dim, config.merge) == (588, 64, 9)
    assert (vision.max_image_tokens, vision.min_pixels, vision.max_wh_ratio) == (1024, 295936, None)
    assert config.row_width == config.hidden_size


def test_a_model_without_a_tower_takes_text_alone(tiny_checkpoint, tmp_path):
    path = tiny_checkpoint(FAMILY_NAME, vision_depth=0).path
    with build(convert(path, tmp_path / "converted", progress=False), reference=True) as llm:
        assert llm.chat(user("hello"), GREEDY).usage.image_tokens == 0
        with pytest.raises(RequestError, match="takes no image"):
            llm.chat(user(noise(56, 56), "?"), GREEDY)
    device = jax.devices()[0]
    model = open_model(path, dtype="float32", device=device)
    params = load_params(path, FAMILY, model.cfg, progress=False)
    assert params["vision"] == {}
    with pytest.raises(RequestError, match="takes text only, not image"):
        model.processor.plan_image(56, 56, {})
    runner = EncoderRunner(FAMILY, model.cfg, None, model.processor, [], 8, device=device)
    assert [job.name for job in runner.jobs()] == ["read rows", "write rows"]
