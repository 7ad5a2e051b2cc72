# SPDX-License-Identifier: Apache-2.0
"""Weight table of Qwen2-VL."""

from __future__ import annotations

from mmjax.models.decoder.weights import text_weights
from mmjax.models.family import Weight
from mmjax.models.qwen2_vl.config import Qwen2VLConfig
from mmjax.models.qwen_shared.weights import tower_attention, tower_ends


def weights(cfg: Qwen2VLConfig) -> tuple[Weight, ...]:
    """Every leaf of the parameter tree and the checkpoint tensors it is made of."""
    return (*_tower(cfg), *text_weights(cfg.text))


def _tower(cfg: Qwen2VLConfig) -> tuple[Weight, ...]:
    v = cfg.vision
    width, mlp, padded, depth = v.hidden_size, v.intermediate_size, v.mlp_width, v.depth
    table = [*tower_ends(v, norm_bias=True), *tower_attention(v)]
    for i in range(depth):
        ours, theirs = f"vision.blocks.{i}", f"visual.blocks.{i}.mlp"
        table += [
            Weight(f"{ours}.fc1", (f"{theirs}.fc1.weight",), ((mlp, width),), pad_to=((0, padded),)),
            Weight(f"{ours}.fc2", (f"{theirs}.fc2.weight",), ((width, mlp),), pad_to=((1, padded),)),
        ]
    blocks, vectors = "visual.blocks.{i}", "vision.vectors"
    for norm in ("norm1", "norm2"):
        table += [
            Weight(f"{vectors}.{norm}", (f"{blocks}.{norm}.weight",), ((width,),), stack=depth),
            Weight(f"{vectors}.{norm}_bias", (f"{blocks}.{norm}.bias",), ((width,),), stack=depth),
        ]
    table += [
        Weight(f"{vectors}.fc1_bias", (f"{blocks}.mlp.fc1.bias",), ((mlp,),), stack=depth, pad_to=((0, padded),)),
        Weight(f"{vectors}.fc2_bias", (f"{blocks}.mlp.fc2.bias",), ((width,),), stack=depth),
    ]
    return tuple(table)
