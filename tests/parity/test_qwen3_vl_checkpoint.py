# SPDX-License-Identifier: Apache-2.0
"""Claim: a Qwen3-VL checkpoint is read whole, says what is wrong with it, and survives conversion and export."""

from __future__ import annotations

import copy
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from conversion.export import export
from conversion.loader import load_params
from conversion.orbax_io import convert
from mmjax.errors import CheckpointError
from mmjax.models.qwen3_vl import FAMILY
from mmjax.models.qwen3_vl.config import Qwen3VLConfig

# As published with the 8B model.
PUBLISHED = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def changed(section: str | None, **values) -> dict:
    """The published config with other values; None takes a key away."""
    hf = copy.deepcopy(PUBLISHED)
    target = hf if section is None else hf[section]
    target |= values
    for key in [key for key, value in values.items() if value is None]:
        del target[key]
    return hf


def test_the_published_config():
    cfg = Qwen3VLConfig.from_hf(PUBLISHED)
    assert hash(cfg) == hash(Qwen3VLConfig.from_hf(copy.deepcopy(PUBLISHED)))
    assert (cfg.dtype, cfg.vocab_size, cfg.hidden_size, cfg.row_width) == ("bfloat16", 151936, 4096, 4 * 4096)
    assert (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (36, 32, 8, 128)
    assert (cfg.position_axes, cfg.max_position_embeddings, cfg.merge, cfg.patch_values) == (3, 262144, 4, 1536)
    assert (cfg.text.mrope_section, cfg.text.rope_theta, cfg.text.deepstack_layers) == ((24, 20, 20), 5e6, (0, 1, 2))
    assert (cfg.vision.head_dim, cfg.vision.mlp_width, cfg.vision.table_side) == (72, 4352, 48)
    assert cfg.window_capacity == 0
    assert cfg.never_sampled == (151655, 151656, 151652, 151653)


def test_a_head_is_tied_at_the_top_level_alone():
    assert Qwen3VLConfig.from_hf(changed(None, tie_word_embeddings=True)).text.tie_word_embeddings
    assert not Qwen3VLConfig.from_hf(changed("text_config", tie_word_embeddings=True)).text.tie_word_embeddings
    assert not Qwen3VLConfig.from_hf(changed(None, tie_word_embeddings=None)).text.tie_word_embeddings


def test_heads_are_128_wide_where_the_file_does_not_say():
    assert Qwen3VLConfig.from_hf(changed("text_config", head_dim=None, hidden_size=4096)).head_dim == 128


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("vision_config", {"num_position_embeddings": 2300}, "num_position_embeddings must be the square"),
        ("vision_config", {"deepstack_visual_indexes": [16, 8]}, "deepstack_visual_indexes must ascend within 0..26"),
        ("vision_config", {"deepstack_visual_indexes": [8, 27]}, "deepstack_visual_indexes must ascend within 0..26"),
        ("vision_config", {"deepstack_visual_indexes": None}, "vision_config.deepstack_visual_indexes is missing"),
        ("vision_config", {"out_hidden_size": 2048}, "vision_config.out_hidden_size"),
        ("vision_config", {"hidden_act": "relu"}, "vision_config.hidden_act"),
        ("text_config", {"attention_bias": True}, "text_config.attention_bias"),
        ("text_config", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type"),
        ("text_config", {"rope_theta": None}, "rope_theta is missing"),
        (None, {"text_config": None}, "text_config is missing"),
        (None, {"video_token_id": None}, "video_token_id is missing"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(section, values, named):
    with pytest.raises(CheckpointError, match=named):
        Qwen3VLConfig.from_hf(changed(section, **values))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_conversion_and_export_give_the_same_tensors_back(tiny_checkpoint, tmp_path, tie):
    checkpoint = tiny_checkpoint("qwen3_vl", layers=1, vision_depth=2, mlp=544, vision_mlp=544, tie=tie)
    hf = json.loads((checkpoint.path / "config.json").read_text())
    cfg = FAMILY.config(hf)
    direct = load_params(checkpoint.path, FAMILY, cfg, progress=False)
    assert direct["text"]["layers"][0]["down"].shape == (64, 576)  # both MLPs are padded
    assert direct["vision"]["blocks"][0]["fc1"].shape == (576, 32)
    restored = load_params(convert(checkpoint.path, tmp_path / "orbax", progress=False), FAMILY, cfg, progress=False)
    jax.tree.map(np.testing.assert_array_equal, restored, direct)
    exported = export(restored, FAMILY, cfg, tmp_path / "hf", config=hf)
    original, again = (load_file(path / "model.safetensors") for path in (checkpoint.path, exported))
    assert original.keys() == again.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(again[name], tensor)
