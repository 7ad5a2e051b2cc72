# SPDX-License-Identifier: Apache-2.0
"""Claim: configs and weights of families with a Pixtral tower are read in every layout, whole, or refused by name."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import tolerances
import torch
import transformers
from mistral_kit import FAMILIES, TOWERS, reference_inputs
from safetensors.numpy import load_file, save_file
from tiny_families.mistral import ID

from conversion.checkpoint import describe
from conversion.export import export
from conversion.layout import leaves
from conversion.loader import load_params
from conversion.orbax_io import convert
from conversion.verify import render, verify
from mmjax.errors import CheckpointError
from mmjax.hf_tokenizer import load_tokenizer
from mmjax.loading import open_model
from mmjax.models import registry
from mmjax.models.pixtral_shared.weights import canonical_name

# As published, written by transformers 4: sizes that are the classes' defaults may be missing.
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}
PIXTRAL = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_seq_length": 1,
    "image_token_index": 10,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 1024000,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"head_dim": 64, "image_size": 1024, "model_type": "pixtral", "patch_size": 16},
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
# The published sizes, as transformers 5 writes them.
LIGHTON_OCR = {
    "architectures": ["LightOnOcrForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_id": 151655,
    "model_type": "lighton_ocr",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "layer_types": ["full_attention"] * 28,
        "max_position_embeddings": 8192,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "vision_config": MISTRAL3["vision_config"],
}


def config_of(hf: dict):
    return registry.family_for(hf["model_type"]).config(hf)


def newer(hf: dict) -> dict:
    """The layout of transformers 5: rotary settings under `rope_parameters`, and another name of the dtype."""
    hf = copy.deepcopy(hf)
    hf["dtype"] = hf.pop("torch_dtype")
    text, vision = hf["text_config"], hf["vision_config"]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta", 10000.0)}
    return hf


def changed(hf: dict, path: str, value: object) -> dict:
    """A copy with `value` at a dotted path; "gone" removes the key."""
    hf = copy.deepcopy(hf)
    *sections, key = path.split(".")
    at = hf
    for section in sections:
        at = at.setdefault(section, {})
    at[key] = value
    if value == "gone":
        del at[key]
    return hf


@pytest.mark.parametrize("hf", [MISTRAL3, PIXTRAL], ids=FAMILIES)
def test_both_layouts_of_config_json_read_the_same(hf):
    cfg = config_of(hf)
    assert cfg == config_of(newer(hf))
    assert hash(cfg) == hash(config_of(copy.deepcopy(hf)))
    assert (cfg.dtype, cfg.vocab_size, cfg.hidden_size, cfg.row_width) == ("bfloat16", 131072, 5120, 5120)
    assert (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (40, 32, 8, 128)
    assert (cfg.position_axes, cfg.vision_head_dim, cfg.window_capacity, cfg.image_token_id) == (1, 64, 0, 10)
    assert (cfg.vision.depth, cfg.vision.hidden_size, cfg.vision.intermediate_size) == (24, 1024, 4096)


def test_families_read_their_own_keys():
    new, old = config_of(MISTRAL3), config_of(PIXTRAL)
    assert (new.merge, new.patch_values, new.vision.merger_norm_eps, new.vision.projector_bias) == (4, 588, 1e-5, False)
    assert (old.merge, old.patch_values, old.vision.merger_norm_eps, old.vision.projector_bias) == (1, 768, None, True)
    assert (new.vision.hidden_act, old.vision.hidden_act) == ("silu", "gelu")
    assert (new.text.tie_word_embeddings, old.text.tie_word_embeddings) == (True, False)
    assert config_of(changed(PIXTRAL, "text_config.tie_word_embeddings", True)).text.tie_word_embeddings
    assert not config_of(changed(MISTRAL3, "tie_word_embeddings", False)).text.tie_word_embeddings


def test_lighton_ocr_is_a_tower_of_mistral3_and_the_decoder_of_qwen3():
    cfg = config_of(LIGHTON_OCR)
    assert replace(cfg.vision, out_hidden_size=5120, merger_norm_eps=1e-5) == config_of(MISTRAL3).vision
    assert (cfg.text.qk_norm, cfg.text.rope_theta, cfg.text.tie_word_embeddings) == (True, 1e6, True)
    assert (cfg.dtype, cfg.image_token_id, cfg.head_dim, cfg.max_position_embeddings) == ("bfloat16", 151655, 128, 8192)
    silent = changed(LIGHTON_OCR, "text_config.head_dim", "gone")
    silent = changed(changed(silent, "text_config.use_sliding_window", "gone"), "text_config.sliding_window", 4096)
    assert config_of(changed(silent, "image_token_id", "gone")) == cfg


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("text_config.model_type", "qwen2", "text_config.model_type .* 'qwen2'"),
        ("text_config.use_sliding_window", True, "text_config.use_sliding_window is true"),
        ("text_config.layer_types", ["sliding_attention"], "text_config.layer_types"),
        ("text_config.attention_bias", True, "text_config.attention_bias is true"),
        (
            "text_config.rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1e6},
            "rope_parameters.rope_type .* 'yarn'",
        ),
        ("vision_config.model_type", "siglip_vision_model", "vision_config.model_type .* 'siglip_vision_model'"),
        ("text_config", "gone", "text_config is missing"),
    ],
    ids=str,
)
def test_what_lighton_ocr_cannot_serve_is_named(path, value, named):
    with pytest.raises(CheckpointError, match=named):
        config_of(changed(LIGHTON_OCR, path, value))


def test_lighton_ocr_under_the_name_of_mistral3_is_refused():
    """As its first checkpoints call themselves, for code that goes by their class."""
    with pytest.raises(CheckpointError, match=r"text_config.model_type .* 'qwen3'"):
        config_of(changed(LIGHTON_OCR, "model_type", "mistral3"))


@pytest.mark.parametrize(("hf", "billions"), [(MISTRAL3, 24.0), (PIXTRAL, 12.7), (LIGHTON_OCR, 1.16)], ids=TOWERS)
def test_published_sizes_have_the_parameters_of_their_names(hf, billions):
    record = registry.family_for(hf["model_type"])
    cfg = record.config({**hf, "tie_word_embeddings": False})
    plan = leaves(record.weights(cfg), record.spec(cfg))
    assert sum(np.prod(leaf.shape) for leaf in plan) / 1e9 == pytest.approx(billions, abs=0.1)
    assert not any(leaf.padded for leaf in plan)


@pytest.mark.parametrize("hf", [MISTRAL3, PIXTRAL], ids=FAMILIES)
@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("text_config.sliding_window", 4096, "text_config.sliding_window is 4096"),
        ("text_config.sliding_window", "gone", "text_config.sliding_window is 4096"),
        ("text_config.rope_scaling", {"rope_type": "yarn", "factor": 16.0}, "rope_scaling.rope_type .* 'yarn'"),
        (
            "text_config.rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1e6},
            "rope_parameters.rope_type .* 'yarn'",
        ),
        ("text_config.rope_theta", "gone", "rope_theta is missing"),
        ("text_config.model_type", "ministral3", "text_config.model_type .* 'ministral3'"),
        ("text_config.hidden_act", "gelu", "text_config.hidden_act"),
        ("vision_config.model_type", "siglip_vision_model", "vision_config.model_type .* 'siglip_vision_model'"),
        ("vision_config.hidden_act", "relu", "vision_config.hidden_act"),
        ("vision_config.head_dim", 32, "vision_config.head_dim is 32"),
        ("vision_config.num_attention_heads", 3, "vision_config.num_attention_heads"),
        ("vision_config.num_channels", 1, "vision_config.num_channels is 1"),
        ("vision_config.patch_size", [14, 14], "vision_config.patch_size must be an integer"),
        ("vision_config.rope_parameters", {"rope_type": "linear"}, "vision_config.rope_parameters.rope_type"),
        ("vision_feature_layer", -2, "vision_feature_layer is -2"),
        ("vision_feature_layer", [-1, -2], "vision_feature_layer must be an integer"),
        ("projector_hidden_act", "relu", "projector_hidden_act"),
        ("vision_config", "gone", "vision_config is missing"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_named(hf, path, value, named):
    with pytest.raises(CheckpointError, match=named):
        config_of(changed(hf, path, value))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("vision_config.model_type", "clip_vision_model", "vision_config.model_type .*; got 'clip_vision_model'"),
        ("vision_config.model_type", "gone", "vision_config.model_type .*; got 'clip_vision_model'"),
        ("text_config.model_type", "llama", "text_config.model_type .*; got 'llama'"),
        ("vision_feature_select_strategy", "gone", "vision_feature_select_strategy .*; got 'default'"),
        ("vision_feature_layer", "gone", "vision_feature_layer is -2"),
    ],
    ids=str,
)
def test_other_llavas_are_refused(path, value, named):
    with pytest.raises(CheckpointError, match=named):
        config_of(changed(PIXTRAL, path, value))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", TOWERS)
def test_weight_table_covers_the_model_and_the_tree_exactly(tiny_checkpoint, family, tie):
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=2, tie=tie)
    described = describe(checkpoint.path)
    record = described.family()
    cfg = record.config(described.config)
    table = {}
    for weight in record.weights(cfg):
        for source, shape in zip(weight.sources, weight.source_shapes, strict=True):
            for name in [source.format(i=i) for i in range(weight.stack)] if weight.stack else [source]:
                assert name not in table
                table[name] = shape
    model = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.state_dict().items()}
    if tie:
        del model["lm_head.weight"]
    assert table == model
    assert {record.canonical_name(name) for name in table} == set(table)
    stored = {record.canonical_name(tensor.name): tensor.shape for tensor in described.tensors()}
    assert stored == table
    leaves(record.weights(cfg), record.spec(cfg))  # raises where table and tree differ in paths or shapes


def load(path):
    """Config and parameters of the checkpoint in `path`."""
    checkpoint = describe(path)
    cfg = checkpoint.family().config(checkpoint.config)
    return cfg, load_params(path, checkpoint.family(), cfg, progress=False)


def assert_same_bits(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True), got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_row_ends_must_have_embeddings(tiny_checkpoint, tmp_path, family):
    """The token of rows alone may lie beyond the vocabulary."""
    path = shutil.copytree(tiny_checkpoint(family, layers=1, vision_depth=1).path, tmp_path / "small")
    hf = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(hf | {"text_config": hf["text_config"] | {"vocab_size": ID["[IMG]"]}}))
    with pytest.raises(CheckpointError, match=rf"token {ID['[IMG_BREAK]']} .* ends at {ID['[IMG]']}"):
        open_model(path, dtype="float32", device=jax.devices()[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_either_layout_load_the_same(tiny_checkpoint, tmp_path, family):
    """transformers writes the older names; these are those of its modules."""
    path = tiny_checkpoint(family, layers=1, vision_depth=1).path
    nested = shutil.copytree(path, tmp_path / "nested")
    tensors = load_file(nested / "model.safetensors")
    assert "language_model.model.norm.weight" in tensors
    renamed = {canonical_name(name): value for name, value in tensors.items()}
    assert "model.language_model.norm.weight" in renamed
    assert not renamed.keys() & tensors.keys()
    save_file(renamed, nested / "model.safetensors", metadata={"format": "pt"})
    assert_same_bits(load(nested)[1], load(path)[1])


@pytest.mark.parametrize(("family", "tie"), [("mistral3", True), ("pixtral", False), ("lighton_ocr", True)])
def test_transformers_loads_what_export_writes(tiny_checkpoint, tmp_path, family, tie):
    """Every parameter comes back bit for bit, from matrices that were padded (544 is no multiple of 64)."""
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=1, mlp=544, vision_mlp=544, tie=tie)
    described = describe(checkpoint.path)
    cfg, params = load(checkpoint.path)
    assert ("lm_head" in params["text"]) != tie
    out = export(params, described.family(), cfg, tmp_path, config=described.config, shard_bytes=500_000)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(out, local_files_only=True).state_dict()
    original = checkpoint.model.state_dict()
    assert loaded.keys() == original.keys()
    for key, value in original.items():
        np.testing.assert_array_equal(loaded[key].numpy(), value.numpy(), err_msg=key)


@pytest.mark.parametrize("family", TOWERS)
def test_verify_passes_before_and_after_conversion(tiny_checkpoint, tmp_path, family):
    path = tiny_checkpoint(family, layers=2, vision_depth=2).path
    converted = convert(path, tmp_path / "converted", progress=False)
    assert_same_bits(load(converted)[1], load(path)[1])
    for directory in (path, converted):
        report = verify(directory, new_tokens=4, progress=False)
        assert report.passed, render(report)
        assert all(result.error == 0 for result in report.results[:3])  # ids, positions, pixels


@pytest.mark.parametrize(("family", "tie"), [("mistral3", False), ("mistral3", True), ("pixtral", False)])
def test_a_stored_head_counts_where_the_config_is_silent(tiny_checkpoint, tmp_path, family, tie):
    """Published files of Mistral3 do not mention tying, which its class does by default, and hold their own head."""
    checkpoint = tiny_checkpoint(family, layers=1, vision_depth=1, tie=tie)
    path = shutil.copytree(checkpoint.path, tmp_path / "silent")
    hf = json.loads((path / "config.json").read_text())
    del hf["tie_word_embeddings"], hf["text_config"]["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(hf))
    cfg, params = load(path)
    assert cfg.text.tie_word_embeddings == tie
    assert_same_bits(params, load(checkpoint.path)[1])
    converted = convert(path, tmp_path / "converted", progress=False)
    assert_same_bits(load(converted)[1], params)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, local_files_only=True).eval()
    inputs = reference_inputs(checkpoint, "<s>[INST]How old is the moon?[/INST]", [])
    with torch.no_grad():
        expected, logits = (model(**inputs).logits.numpy() for model in (checkpoint.model, theirs))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_loads_in_a_fresh_process(tiny_checkpoint, family):
    """Where nothing has mended torchvision, which the config of the LLaVA class imports beside a CPU-only torch."""
    code = (
        "import sys; from pathlib import Path; from mmjax.hf_tokenizer import load_tokenizer\n"
        "print(load_tokenizer(Path(sys.argv[1])).convert_tokens_to_ids('[IMG_BREAK]'))"
    )
    command = [sys.executable, "-c", code, str(tiny_checkpoint(family, layers=1, vision_depth=1).path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == ID["[IMG_BREAK]"]


def test_mistrals_own_tokenizer_format_is_passed_over(tiny_checkpoint, tmp_path, monkeypatch):
    """With mistral-common installed transformers would prefer it, and it has no fast form."""
    from transformers.integrations.mistral import tokenizer as module
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    def never(*args, **kwargs):
        raise AssertionError("looked for tekken.json")

    monkeypatch.setattr(module, "resolve_mistral_format", never)
    monkeypatch.setitem(TOKENIZER_MAPPING_NAMES, "mistral3", "MistralCommonBackend")  # as with that package
    path = shutil.copytree(tiny_checkpoint("mistral3", layers=1, vision_depth=1).path, tmp_path / "both")
    (path / "tekken.json").write_text("{}")
    with pytest.raises(AssertionError, match="looked for"):
        transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert load_tokenizer(path).backend_tokenizer is not None
