# SPDX-License-Identifier: Apache-2.0
"""Weight table of Qwen2.5-VL."""

from __future__ import annotations

from mmjax.models.decoder.weights import text_weights
from mmjax.models.family import Weight
from mmjax.models.qwen2_5_vl.config import Qwen25VLConfig, Qwen25VLVisionConfig
from mmjax.models.qwen_shared.weights import tower_attention, tower_ends


def weights(cfg: Qwen25VLConfig) -> tuple[Weight, ...]:
    """Every leaf of the parameter tree and the checkpoint tensors it is made of."""
    return (*tower_weights(cfg.vision), *text_weights(cfg.text))


def tower_weights(v: Qwen25VLVisionConfig) -> tuple[Weight, ...]:
    """The leaves of `vision`."""
    width, mlp, padded, depth = v.hidden_size, v.intermediate_size, v.mlp_width, v.depth
    gate_and_up = ("gate_proj", "up_proj")
    table = [*tower_ends(v, norm_bias=False), *tower_attention(v)]
    for i in range(depth):
        ours, theirs = f"vision.blocks.{i}", f"visual.blocks.{i}.mlp"
        table += [
            Weight(
                f"{ours}.gate_up",
                tuple(f"{theirs}.{name}.weight" for name in gate_and_up),
                ((mlp, width), (mlp, width)),
                pad_to=((0, padded),),
            ),
            Weight(f"{ours}.down", (f"{theirs}.down_proj.weight",), ((width, mlp),), pad_to=((1, padded),)),
        ]
    blocks, vectors = "visual.blocks.{i}", "vision.vectors"
    table += [
        *(
            Weight(f"{vectors}.{norm}", (f"{blocks}.{norm}.weight",), ((width,),), stack=depth)
            for norm in ("norm1", "norm2")
        ),
        Weight(
            f"{vectors}.gate_up_bias",
            tuple(f"{blocks}.mlp.{name}.bias" for name in gate_and_up),
            ((mlp,), (mlp,)),
            stack=depth,
            pad_to=((0, padded),),
        ),
        Weight(f"{vectors}.down_bias", (f"{blocks}.mlp.down_proj.bias",), ((width,),), stack=depth),
    ]
    return tuple(table)
