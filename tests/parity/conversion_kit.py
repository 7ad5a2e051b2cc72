# SPDX-License-Identifier: Apache-2.0
"""A toy family that needs every feature of the weight table, and directories that hold its checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from mmjax.models.family import Family, Weight


@dataclass(frozen=True)
class ToyConfig:
    """Sizes of the toy; `tied` leaves the head out of the tree."""

    dtype: str = "float32"
    layers: int = 3
    width: int = 8
    mlp: int = 5
    padded_mlp: int = 8
    vocab: int = 11
    tied: bool = False


def toy_spec(cfg: ToyConfig) -> dict:
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.dtype))

    E, L = cfg.width, cfg.layers
    layer = {"qkv": leaf(2 * E, E), "gate_up": leaf(2 * cfg.padded_mlp, E), "down": leaf(E, cfg.padded_mlp)}
    text = {
        "embed": leaf(cfg.vocab, E),
        "layers": [dict(layer) for _ in range(L)],
        "vectors": {"qkv_bias": leaf(L, 2 * E), "norm": leaf(L, E), "up_bias": leaf(L, cfg.padded_mlp)},
        "turned": leaf(L, E, 2 * cfg.padded_mlp),
    }
    if not cfg.tied:
        text["lm_head"] = leaf(cfg.vocab, E)
    return {"vision": {"patch_embed": leaf(E, 3 * 2 * 2)}, "text": text}


def toy_weights(cfg: ToyConfig) -> tuple[Weight, ...]:
    E, M, P = cfg.width, cfg.mlp, cfg.padded_mlp
    qkv = ("q", "k", "v")
    rows = (E, E // 2, E // 2)
    table = [
        Weight("text.embed", ("embed.weight",), ((cfg.vocab, E),)),
        Weight("vision.patch_embed", ("patch.weight",), ((E, 3, 2, 2),), shape=(E, 12)),
        Weight(
            "text.vectors.qkv_bias",
            tuple(f"layers.{{i}}.{n}.bias" for n in qkv),
            tuple((r,) for r in rows),
            stack=cfg.layers,
        ),
        Weight("text.vectors.norm", ("layers.{i}.norm.weight",), ((E,),), stack=cfg.layers),
        Weight("text.vectors.up_bias", ("layers.{i}.up.bias",), ((M,),), stack=cfg.layers, pad_to=((0, P),)),
        Weight(
            "text.turned",
            ("layers.{i}.first.weight", "layers.{i}.second.weight"),
            ((M, E), (M, E)),
            stack=cfg.layers,
            pad_to=((0, P),),
            transposed=True,
        ),
    ]
    if not cfg.tied:
        table.append(Weight("text.lm_head", ("lm_head.weight",), ((cfg.vocab, E),)))
    for i in range(cfg.layers):
        at, to = f"layers.{i}.", f"text.layers.{i}."
        table += [
            Weight(to + "qkv", tuple(f"{at}{n}.weight" for n in qkv), tuple((r, E) for r in rows)),
            Weight(to + "gate_up", (at + "gate.weight", at + "up.weight"), ((M, E), (M, E)), pad_to=((0, P),)),
            Weight(to + "down", (at + "down.weight",), ((E, M),), pad_to=((1, P),)),
        ]
    return tuple(table)


def toy_family() -> Family:
    """Only what the converter uses is real. Names with the prefix "model." are a second checkpoint layout."""
    unused = {field.name: None for field in fields(Family)}
    return Family(
        **unused
        | {
            "name": "toy",
            "model_types": ("toy",),
            "spec": toy_spec,
            "weights": toy_weights,
            "canonical_name": lambda name: name.removeprefix("model."),
            "other_layouts": lambda cfg: (),
        }
    )


def toy_tensors(cfg: ToyConfig, seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    """A full checkpoint by canonical name."""
    rng = np.random.default_rng(seed)
    shapes = {}
    for weight in toy_weights(cfg):
        for i in range(max(1, weight.stack)):
            for source, shape in zip(weight.sources, weight.source_shapes, strict=True):
                shapes[source.format(i=i)] = shape
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_checkpoint(path: Path, tensors: dict[str, np.ndarray], shards: int = 1, config: dict | None = None) -> Path:
    """A Hugging Face directory: config, stand-ins for tokenizer and processor, weights in `shards` files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "toy"}))
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (path / name).write_text("{}")
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[k::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


_IDS = {"image_token_id": 261, "video_token_id": 262, "vision_start_token_id": 259, "vision_end_token_id": 260}
_TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}
_VISION = {"num_heads": 2, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "dtype": "float32",
    "tie_word_embeddings": True,
    "text_config": {"model_type": "qwen2_vl_text", **_TEXT},
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, **_VISION},
    **_IDS,
}
QWEN2_5_VL = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "dtype": "float32",
    "tie_word_embeddings": False,
    "text_config": {"model_type": "qwen2_5_vl_text", **_TEXT},
    "vision_config": {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1, 3],
        "window_size": 56,
        "tokens_per_second": 2,
        "hidden_act": "silu",
        **_VISION,
    },
    **_IDS,
}
