# SPDX-License-Identifier: Apache-2.0
"""Claim: Qwen3-VL mixtures load from either layout of experts, never by a tensor's own shape, and go back out."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import tolerances
import torch
import transformers
from qwen_kit import CASES, Ours, reference_inputs
from safetensors.numpy import load_file, save_file
from test_qwen_models import reference_text, text_arguments

from conversion.export import export
from conversion.loader import load_params
from conversion.orbax_io import convert
from mmjax.errors import CheckpointError
from mmjax.models.decoder import text
from mmjax.models.decoder.config import MoeConfig
from mmjax.models.registry import family_for

FAMILY = family_for("qwen3_vl_moe")
WIDTH = 64  # of the tiny decoder
# MLP widths of an expert: both shapes of both tensors differ; those of gate_up_proj are one; those of down_proj are.
EXPERT_WIDTHS = {"no square": 24, "2I = E": WIDTH // 2, "I = E": WIDTH}
SMALL = {"layers": 2, "vision_depth": 1}


def config_of(path):
    return FAMILY.config(json.loads((path / "config.json").read_text()))


def load(path) -> dict:
    return load_params(path, FAMILY, config_of(path), progress=False)


def assert_same(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def logits_of(ours: Ours, inputs, positions) -> np.ndarray:
    rows = np.zeros((0, ours.cfg.row_width), np.float32)
    return ours.layers_and_logits(text.layer_outputs, *text_arguments(inputs, rows, positions))[1]


@pytest.mark.parametrize("published", [True, False], ids=["published", "of transformers 5"])
@pytest.mark.parametrize("expert_mlp", EXPERT_WIDTHS.values(), ids=EXPERT_WIDTHS)
def test_both_layouts_give_the_model_that_was_stored(tiny_checkpoint, expert_mlp, published):
    checkpoint = tiny_checkpoint("qwen3_vl_moe", **SMALL, expert_mlp=expert_mlp, published=published)
    inputs = reference_inputs(checkpoint, CASES["text"])
    _, logits, positions = reference_text(checkpoint.model, inputs)
    ours = Ours(checkpoint)
    np.testing.assert_allclose(logits_of(ours, inputs, positions), logits, rtol=0, atol=tolerances.LOGITS)
    experts = checkpoint.model.model.language_model.layers[1].mlp.experts
    layer = ours.params["text"]["layers"][1]
    np.testing.assert_array_equal(layer["experts_gate_up"], experts.gate_up_proj.detach().mT.numpy())
    np.testing.assert_array_equal(layer["experts_down"], experts.down_proj.detach().mT.numpy())


def test_a_mixture_of_layouts_is_refused(tiny_checkpoint, tmp_path):
    checkpoint = tiny_checkpoint("qwen3_vl_moe", **SMALL | {"layers": 3}, published=True)
    tensors = load_file(checkpoint.path / "model.safetensors")
    turned = "model.language_model.layers.2.mlp.experts.down_proj"
    tensors[turned] = np.ascontiguousarray(tensors[turned].swapaxes(1, 2))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint.path / name).read_bytes())
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "1 misshaped" in str(caught.value)
    assert f"{turned}: [6, 64, 24], config.json implies [6, 24, 64]" in str(caught.value)


@pytest.mark.parametrize("published", [True, False], ids=["published", "of transformers 5"])
def test_save_load_convert_load(tiny_checkpoint, tmp_path, published):
    """Loaded, exported, loaded, converted, loaded: the same parameters; transformers reads what is exported."""
    checkpoint = tiny_checkpoint("qwen3_vl_moe", **SMALL, published=published)
    params, cfg = load(checkpoint.path), config_of(checkpoint.path)
    config = json.loads((checkpoint.path / "config.json").read_text())
    out = export(params, FAMILY, cfg, tmp_path / "out", config=config)
    for name in ("tokenizer.json", "processor_config.json"):
        (out / name).write_bytes((checkpoint.path / name).read_bytes())
    assert_same(load(out), params)
    stored = load_file(out / "model.safetensors")["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    assert stored.shape == (6, WIDTH, 2 * 24)
    assert_same(load(convert(out, tmp_path / "converted", progress=False)), params)
    again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(out, dtype="float32")
    for name, parameter in checkpoint.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name


PUBLISHED_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_theta": 5000000,
    "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config_with(**text_values) -> dict:
    ids = {f"{kind}_token_id": i for i, kind in enumerate(("image", "video", "vision_start", "vision_end"))}
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    values = {key: value for key, value in (PUBLISHED_TEXT | text_values).items() if value is not None}
    return {"model_type": "qwen3_vl_moe", "text_config": values, "vision_config": vision} | ids


@pytest.mark.parametrize(
    ("changed", "sparse"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
        ({"num_experts": None, "num_local_experts": 128}, (0, 1, 2, 3)),  # as transformers 5 spells it
    ],
)
def test_which_layers_have_experts(changed, sparse):
    cfg = FAMILY.config(config_with(**changed))
    assert cfg.text.moe == MoeConfig(128, 8, 768, norm_topk=True, sparse_layers=sparse)
    for i, layer in enumerate(FAMILY.spec(cfg)["text"]["layers"]):
        assert ("experts_down" in layer, "down" in layer) == (i in sparse, i not in sparse)


@pytest.mark.parametrize("changed", [{"num_experts": 0}, {"mlp_only_layers": [0, 1, 2, 3]}, {"decoder_sparse_step": 5}])
def test_a_model_without_sparse_layers_is_dense(changed):
    assert FAMILY.config(config_with(**changed)).text.moe is None


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"num_experts": None}, "text_config.num_experts is missing"),
        ({"num_experts_per_tok": None}, "text_config.num_experts_per_tok is missing"),
        ({"moe_intermediate_size": None}, "text_config.moe_intermediate_size is missing"),
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok must be between 1 and 128 \(num_experts\), got 129"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be positive, got 0"),
    ],
)
def test_unusable_configs_name_the_key(changed, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        FAMILY.config(config_with(**changed))
