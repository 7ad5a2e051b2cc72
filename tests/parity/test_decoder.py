# SPDX-License-Identifier: Apache-2.0
"""Claim: the shared decoder computes what the text models of transformers compute, layer by layer, option by option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tolerances
import torch
import transformers

from conversion.layout import leaves
from kernels_pallas.dispatch import reference_attention
from mmjax.errors import CheckpointError
from mmjax.models.decoder import text
from mmjax.models.decoder.config import DecoderConfig, MoeConfig, decoder_config
from mmjax.models.decoder.weights import text_weights
from mmjax.models.hf_config import ConfigSection
from mmjax.models.vlm import VLMConfig

TOKENS = 11
COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
QWEN3_VL = {"qk_norm": True, "mrope": True, "mrope_interleaved": True}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 1.7, "residual_multiplier": 0.22}


def _granite_features(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_scale": hf["attention_multiplier"],
        "embedding_multiplier": hf["embedding_multiplier"],
        "residual_multiplier": hf["residual_multiplier"],
    }


@dataclass(frozen=True)
class Kind:
    """A text model of transformers: class prefix, config values besides `COMMON`, and what our reader is told of it."""

    prefix: str
    values: Mapping[str, Any] = field(default_factory=dict)
    features: Any = lambda hf: {}
    suffix: str = "ForCausalLM"


KINDS = {
    "qwen2": Kind("Qwen2", {"use_sliding_window": False}, lambda hf: {"qkv_bias": True, "window_flag": True}),
    "qwen3": Kind("Qwen3", {"head_dim": 20}, lambda hf: {"qk_norm": True}),
    "qwen3 on three axes": Kind(
        "Qwen3VLText",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]}},
        lambda hf: QWEN3_VL,
        "Model",
    ),
    "qwen3 with experts": Kind(
        "Qwen3VLMoeText",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 2, 2]},
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
        lambda hf: {
            "qk_norm": True,
            "mrope": True,
            "mrope_interleaved": True,
            "moe": MoeConfig(5, 2, 20, True, (0, 2)),
        },
        "Model",
    ),
    "mistral": Kind("Mistral", {"sliding_window": None, "head_dim": 12}),
    "granite": Kind(
        "Granite",
        GRANITE | {"logits_scaling": 4.0},
        lambda hf: _granite_features(hf) | {"logits_scaling": 1 / hf["logits_scaling"]},
    ),
    "hyperclovax": Kind(
        "HyperCLOVAX",
        GRANITE | {"logits_scaling": 0.4, "use_post_norm": True},
        lambda hf: _granite_features(hf) | {"logits_scaling": hf["logits_scaling"], "post_norms": True},
    ),
}
WITH_HEAD = [name for name, kind in KINDS.items() if kind.suffix == "ForCausalLM"]


@dataclass(frozen=True)
class Pair:
    """A model of transformers, and our config and parameters of it."""

    model: torch.nn.Module
    cfg: VLMConfig
    params: dict


@lru_cache
def pair(name: str, tie: bool = False) -> Pair:
    kind = KINDS[name]
    try:
        config_class, model_class = (getattr(transformers, kind.prefix + end) for end in ("Config", kind.suffix))
    except AttributeError:
        pytest.skip(f"transformers {transformers.__version__} has no {kind.prefix}")
    model = model_class(config_class(**COMMON | kind.values | {"tie_word_embeddings": tie}))
    model.set_attn_implementation("eager")
    tiny.redraw(model, seed=1, scale=0.15)
    hf = model.config.to_dict()
    cfg = VLMConfig(decoder_config(ConfigSection(hf), tie_word_embeddings=tie, **kind.features(hf)), None, "float32")
    tensors = {key: value.numpy() for key, value in model.state_dict().items()}
    for key in [key for key in tensors if "experts" in key]:
        inputs = COMMON["hidden_size"] if "gate_up" in key else kind.values["moe_intermediate_size"]
        if tensors[key].shape[1] != inputs:  # checkpoints have inputs first, the library's memory in either order
            tensors[key] = tensors[key].swapaxes(1, 2)
    if kind.suffix == "Model":
        tensors = {f"model.{key}": value for key, value in tensors.items()}
        tensors["lm_head.weight"] = np.ones((96, 48), np.float32)
    return Pair(model, cfg, load(cfg, tensors))


def load(cfg: VLMConfig, tensors: Mapping[str, np.ndarray]) -> dict:
    """Our parameters, through the weight table, which must use every tensor."""
    spec = {"text": text.text_spec(cfg)}
    unused = set(tensors) - ({"lm_head.weight"} if cfg.text.tie_word_embeddings else set())
    arrays = []
    for leaf in leaves(text_weights(cfg.text), spec):
        array = np.zeros(leaf.shape, leaf.dtype)
        for piece in leaf.pieces:
            piece.of(array)[...] = tensors[piece.name].reshape(piece.view)
            unused.remove(piece.name)
        arrays.append(jnp.asarray(array))
    assert not unused
    return jax.tree.unflatten(jax.tree.structure(spec), arrays)["text"]


def positions_of(cfg: VLMConfig) -> np.ndarray:
    """Ascending on one axis, scattered on several."""
    if cfg.position_axes == 1:
        return np.arange(TOKENS, dtype=np.int32)[None]
    return np.random.default_rng(2).integers(0, 40, (cfg.position_axes, TOKENS)).astype(np.int32)


IDS = np.random.default_rng(3).integers(0, 96, TOKENS)


def reference(model: torch.nn.Module, cfg: VLMConfig) -> tuple[list[np.ndarray], np.ndarray]:
    """Hidden states before every layer and behind the final norm; and logits, [T, 0] without a head."""
    where = torch.from_numpy(positions_of(cfg)).long()
    with torch.no_grad():
        out = model(
            torch.from_numpy(IDS)[None],
            position_ids=where if len(where) == 1 else where[:, None],
            output_hidden_states=True,
            use_cache=False,
        )
    logits = out.logits[0].float().numpy() if "logits" in out else np.zeros((TOKENS, 0), np.float32)
    return [state[0].float().numpy() for state in out.hidden_states], logits


def ours(params: dict, cfg: VLMConfig) -> tuple[list[np.ndarray], np.ndarray]:
    """The same of the shared decoder."""

    @jax.jit
    def run(params, ids, positions):
        step = (text.embed(params, cfg, ids), positions, ((),) * cfg.num_layers, None, reference_attention())
        around, _ = text.layer_outputs(params, cfg, *step)
        final, _ = text.forward(params, cfg, *step)
        return [*around[:-1], final], text.logits(params, cfg, final)

    around, logits = run(params, IDS.astype(np.int32), positions_of(cfg))
    return [np.asarray(x, np.float32) for x in around], np.asarray(logits)


@pytest.mark.parametrize("name", KINDS)
def test_every_layer_and_the_logits_match(name):
    made = pair(name)
    theirs, their_logits = reference(made.model, made.cfg)
    mine, my_logits = ours(made.params, made.cfg)
    assert len(mine) == len(theirs) == 4
    for i, (state, expected) in enumerate(zip(mine, theirs, strict=True)):
        np.testing.assert_allclose(state, expected, rtol=0, atol=tolerances.LOGITS, err_msg=f"before layer {i}")
    if name in WITH_HEAD:
        np.testing.assert_allclose(my_logits, their_logits, rtol=0, atol=tolerances.LOGITS)
        assert np.abs(their_logits).max() > 100 * tolerances.LOGITS


def test_a_tied_head_is_the_embedding():
    made = pair("qwen3", tie=True)
    assert "lm_head" not in made.params
    _, expected = reference(made.model, made.cfg)
    np.testing.assert_allclose(ours(made.params, made.cfg)[1], expected, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize("name", ["qwen3", "granite"])
def test_bfloat16_errs_no_more_than_the_reference(name):
    made = pair(name)
    _, exact = reference(made.model, made.cfg)
    low = type(made.model)(made.model.config).to(torch.bfloat16)
    low.load_state_dict(made.model.state_dict())
    _, theirs = reference(low.eval(), made.cfg)
    cfg = VLMConfig(made.cfg.text, None, "bfloat16")
    _, mine = ours(jax.tree.map(lambda x: x.astype(jnp.bfloat16), made.params), cfg)
    error, allowed = (np.sqrt(np.mean((x - exact) ** 2)) for x in (mine, theirs))
    assert error <= tolerances.BF16_ERROR_RATIO * allowed


HF = COMMON | {"hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def read(change: Mapping[str, Any], **features: Any) -> DecoderConfig:
    return decoder_config(ConfigSection(HF | change, "text_config"), tie_word_embeddings=False, **features)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": HF["rope_parameters"] | values}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"sliding_window": 64, "use_sliding_window": True}, "use_sliding_window is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (rope(rope_type="yarn"), "rope_parameters.rope_type"),
        (rope(rope_type="mrope"), "rope_parameters.rope_type"),
        (rope(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (rope(mrope_interleaved=True), "mrope_interleaved"),
        (rope(mrope_section=[2, 2, 2]), "mrope_section"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"hidden_size": 50}, "num_attention_heads"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(change, named):
    with pytest.raises(CheckpointError, match=rf"config.json: text_config\..*{named}"):
        read(change)


def test_what_is_there_but_off_is_no_obstacle():
    plain = read({})
    assert (plain.head_dim, plain.position_axes, plain.mrope_section, plain.rope_theta) == (12, 1, (), 1e4)
    assert read({"sliding_window": 64, "use_sliding_window": False}) == plain
    assert read({"sliding_window": 64}, window_flag=True) == plain
    assert read({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": None}) == plain
    assert read({"layer_types": ["full_attention"] * 3, "attention_bias": False, "mlp_bias": False}) == plain
    assert read({"hidden_size": 50, "head_dim": 12}).qkv_width == 96


def test_sections_must_fill_the_head():
    with pytest.raises(CheckpointError, match=r"mrope_section \[2, 3\] must sum to half the head size, 6"):
        read(rope(mrope_section=[2, 3]), mrope=True)
