# SPDX-License-Identifier: Apache-2.0
"""Weight table of Qwen3-VL, in the names that published checkpoints carry: those of transformers' modules."""

from __future__ import annotations

from mmjax.models.decoder.weights import text_weights
from mmjax.models.family import Weight
from mmjax.models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from mmjax.models.qwen_shared.weights import tower_attention

_VISUAL = "model.visual"


def canonical_name(name: str) -> str:
    """The name itself: there is one layout."""
    return name


def weights(cfg: Qwen3VLConfig) -> tuple[Weight, ...]:
    """Every leaf of the parameter tree and the checkpoint tensors it is made of."""
    return (*tower_weights(cfg.vision), *text_weights(cfg.text, model="model.language_model"))


def tower_weights(v: Qwen3VLVisionConfig) -> tuple[Weight, ...]:
    """Every leaf of `vision`."""
    width, joined = v.hidden_size, v.hidden_size * v.merge**2
    kernel = (width, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    embed = f"{_VISUAL}.patch_embed.proj"
    table = [
        Weight("vision.patch_embed", (f"{embed}.weight",), (kernel,), shape=(width, v.patch_values)),
        Weight("vision.patch_embed_bias", (f"{embed}.bias",), ((width,),)),
        Weight("vision.position_table", (f"{_VISUAL}.pos_embed.weight",), ((v.table_side**2, width),)),
        *tower_attention(v, _VISUAL),
        *_block_weights(v),
        *_merger(v, "vision.merger", f"{_VISUAL}.merger", width),
    ]
    for level in range(len(v.deepstack_blocks)):
        table += _merger(v, f"vision.deepstack.{level}", f"{_VISUAL}.deepstack_merger_list.{level}", joined)
    return tuple(table)


def _block_weights(v: Qwen3VLVisionConfig) -> list[Weight]:
    """All of the blocks but their attention."""
    width, mlp, padded, depth = v.hidden_size, v.intermediate_size, v.mlp_width, v.depth
    table = []
    for i in range(depth):
        ours, theirs = f"vision.blocks.{i}", f"{_VISUAL}.blocks.{i}.mlp"
        table += [
            Weight(f"{ours}.fc1", (f"{theirs}.linear_fc1.weight",), ((mlp, width),), pad_to=((0, padded),)),
            Weight(f"{ours}.fc2", (f"{theirs}.linear_fc2.weight",), ((width, mlp),), pad_to=((1, padded),)),
        ]
    blocks, vectors = f"{_VISUAL}.blocks.{{i}}", "vision.vectors"
    for norm in ("norm1", "norm2"):
        table += [
            Weight(f"{vectors}.{norm}", (f"{blocks}.{norm}.weight",), ((width,),), stack=depth),
            Weight(f"{vectors}.{norm}_bias", (f"{blocks}.{norm}.bias",), ((width,),), stack=depth),
        ]
    fc1, fc2 = (f"{blocks}.mlp.linear_{name}.bias" for name in ("fc1", "fc2"))
    return [
        *table,
        Weight(f"{vectors}.fc1_bias", (fc1,), ((mlp,),), stack=depth, pad_to=((0, padded),)),
        Weight(f"{vectors}.fc2_bias", (fc2,), ((width,),), stack=depth),
    ]


def _merger(v: Qwen3VLVisionConfig, ours: str, theirs: str, norm_width: int) -> list[Weight]:
    joined, out = v.hidden_size * v.merge**2, v.out_hidden_size
    leaves = {
        "norm": ("norm.weight", (norm_width,)),
        "norm_bias": ("norm.bias", (norm_width,)),
        "fc1": ("linear_fc1.weight", (joined, joined)),
        "fc1_bias": ("linear_fc1.bias", (joined,)),
        "fc2": ("linear_fc2.weight", (out, joined)),
        "fc2_bias": ("linear_fc2.bias", (out,)),
    }
    return [Weight(f"{ours}.{leaf}", (f"{theirs}.{name}",), (shape,)) for leaf, (name, shape) in leaves.items()]
