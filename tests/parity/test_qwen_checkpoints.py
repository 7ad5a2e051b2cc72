# SPDX-License-Identifier: Apache-2.0
"""Claim: configs and weight tables read what checkpoints of either layout hold, all of it, and say what is wrong."""

from __future__ import annotations

import copy
import json

import pytest

from conversion.layout import leaves
from mmjax.errors import CheckpointError
from mmjax.models import registry
from mmjax.models.hf_config import padded_mlp_width
from mmjax.models.qwen2_5_vl.config import Qwen25VLConfig
from mmjax.models.qwen2_vl.config import Qwen2VLConfig
from mmjax.models.qwen_shared.weights import canonical_name

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

# The older, flat layout, as checkpoints written by transformers 4 have it.
FLAT = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
FLAT_2 = FLAT | {
    "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}


def nested(flat: dict) -> dict:
    """The layout of transformers 5: text keys under `text_config`, rotary settings under `rope_parameters`."""
    moved = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    moved += ("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "use_sliding_window")
    hf = {key: value for key, value in flat.items() if key not in (*moved, "rope_theta", "rope_scaling", "torch_dtype")}
    rope = {"rope_type": "default", "rope_theta": flat["rope_theta"], **flat["rope_scaling"]}
    del rope["type"]
    text = {key: flat[key] for key in moved} | {"rope_parameters": rope}
    vision = flat["vision_config"] | {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
    return hf | {"dtype": flat["torch_dtype"], "text_config": text, "vision_config": vision}


def config_of(hf: dict):
    return registry.family_for(hf["model_type"]).config(hf)


@pytest.mark.parametrize("flat", [FLAT, FLAT_2], ids=["qwen2_5_vl", "qwen2_vl"])
def test_both_layouts_of_config_json_read_the_same(flat):
    cfg = config_of(flat)
    assert cfg == config_of(nested(flat))
    assert hash(cfg) == hash(config_of(copy.deepcopy(flat)))
    assert (cfg.dtype, cfg.vocab_size, cfg.hidden_size, cfg.row_width) == ("bfloat16", 152064, 3584, 3584)
    assert (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (28, 28, 4, 128)
    assert (cfg.position_axes, cfg.max_position_embeddings, cfg.merge, cfg.patch_values) == (3, 128000, 4, 1176)
    assert (cfg.text.mrope_section, cfg.text.rope_theta, cfg.text.mlp_width) == ((16, 24, 24), 1e6, 18944)
    assert (cfg.vision.head_dim, cfg.vision.rope_theta) == (80, 10000.0)


def test_towers_read_their_own_keys():
    new, old = Qwen25VLConfig.from_hf(FLAT), Qwen2VLConfig.from_hf(FLAT_2)
    assert (new.window_capacity, new.vision.full_attention_blocks) == (64, (7, 15, 23, 31))
    assert (new.vision.tokens_per_second, new.vision.hidden_act) == (2.0, "silu")
    assert (new.vision.intermediate_size, new.vision.mlp_width) == (3420, 3456)
    assert (old.window_capacity, old.vision.hidden_act, old.vision.mlp_width) == (0, "quick_gelu", 5120)
    assert [padded_mlp_width(w) for w in (511, 512, 513, 3420, 3456)] == [511, 512, 576, 3456, 3456]


@pytest.mark.parametrize("make", [lambda hf: hf, nested], ids=["flat", "nested"])
@pytest.mark.parametrize("place", ["top", "text"])
def test_a_tied_head_may_be_declared_at_either_level(make, place):
    hf = make(FLAT | {"tie_word_embeddings": False})
    target = hf["text_config"] if place == "text" and "text_config" in hf else hf
    target["tie_word_embeddings"] = True
    cfg = config_of(hf)
    assert cfg.text.tie_word_embeddings
    assert "lm_head" not in registry.family_for("qwen2_5_vl").spec(cfg)["text"]


def test_a_missing_key_is_named():
    for key in ("hidden_size", "rope_theta", "rope_scaling", "image_token_id", "vision_config"):
        with pytest.raises(CheckpointError, match=key):
            config_of({k: v for k, v in FLAT.items() if k != key})
    for key in ("window_size", "fullatt_block_indexes", "tokens_per_second", "depth"):
        vision = {k: v for k, v in FLAT["vision_config"].items() if k != key}
        with pytest.raises(CheckpointError, match=f"vision_config.{key}"):
            config_of(FLAT | {"vision_config": vision})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"type": "yarn", "mrope_section": [16, 24, 24]}}, "rope_scaling.type"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"num_attention_heads": 30}, "num_attention_heads"),
        ({"hidden_size": "3584"}, "hidden_size"),
        ({"vision_config": FLAT["vision_config"] | {"out_hidden_size": 2048}}, "vision_config.out_hidden_size"),
        ({"vision_config": FLAT["vision_config"] | {"rope_parameters": {"rope_type": "yarn"}}}, "parameters.rope_type"),
        ({"vision_config": FLAT["vision_config"] | {"num_heads": 17}}, "vision_config.num_heads 17 must divide"),
    ],
)
def test_a_value_that_cannot_be_served_is_named(change, named):
    with pytest.raises(CheckpointError, match=named):
        config_of(FLAT | change)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_table_covers_the_model_and_the_tree_exactly(tiny_checkpoint, family, tie):
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=2, tie=tie)
    record = registry.family_for(family)
    cfg = record.config(json.loads((checkpoint.path / "config.json").read_text()))
    table = {}
    for weight in record.weights(cfg):
        for source, shape in zip(weight.sources, weight.source_shapes, strict=True):
            for name in [source.format(i=i) for i in range(weight.stack)] if weight.stack else [source]:
                assert name not in table
                table[name] = shape
    model = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.state_dict().items()}
    if tie:
        del model["lm_head.weight"]
    assert table == {record.canonical_name(name): shape for name, shape in model.items()}
    assert {record.canonical_name(name) for name in table} == set(table)
    leaves(record.weights(cfg), record.spec(cfg))  # raises where table and tree differ in paths or shapes


def test_names_of_either_layout_become_the_published_ones():
    assert canonical_name("model.visual.blocks.0.norm1.weight") == "visual.blocks.0.norm1.weight"
    assert canonical_name("model.language_model.norm.weight") == "model.norm.weight"
    for name in ("visual.merger.ln_q.weight", "model.layers.3.mlp.up_proj.weight", "lm_head.weight"):
        assert canonical_name(name) == name


def test_an_unknown_model_type_lists_the_known():
    with pytest.raises(CheckpointError, match=r"'llama' is unknown; known: .*qwen2_5_vl, qwen2_vl"):
        registry.family_for("llama")
