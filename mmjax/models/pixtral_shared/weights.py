# SPDX-License-Identifier: Apache-2.0
"""Weight table of models with a Pixtral tower, in the names that transformers 5 gives their modules."""

from __future__ import annotations

from mmjax.models.decoder.weights import text_weights
from mmjax.models.family import Weight
from mmjax.models.images.normalisation import CHANNELS
from mmjax.models.pixtral_shared.config import PixtralConfig, PixtralVisionConfig

_TOWER, _PROJECTOR, _TEXT = "model.vision_tower", "model.multi_modal_projector", "model.language_model"
# Published checkpoints are older: parts stand side by side, and the decoder holds its head.
_OLDER = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", f"{_TEXT}."),
    ("vision_tower.", f"{_TOWER}."),
    ("multi_modal_projector.", f"{_PROJECTOR}."),
)


def canonical_name(name: str) -> str:
    """The name in transformers 5 of a tensor in either layout."""
    for older, newer in _OLDER:
        if name.startswith(older):
            return newer + name.removeprefix(older)
    return name


def weights(cfg: PixtralConfig) -> tuple[Weight, ...]:
    """Every leaf of the parameter tree and the checkpoint tensors it is made of."""
    return (*_tower(cfg.vision), *_projector(cfg.vision), *text_weights(cfg.text, model=_TEXT))


def _tower(v: PixtralVisionConfig) -> tuple[Weight, ...]:
    """The patch embedding, a convolution read as a matrix, and every block with q, k, v and gate, up joined."""
    width, mlp, padded = v.hidden_size, v.intermediate_size, v.mlp_width
    kernel = (width, CHANNELS, v.patch_size, v.patch_size)
    table = [
        Weight("vision.patch_embed", (f"{_TOWER}.patch_conv.weight",), (kernel,), shape=(width, v.patch_values)),
        Weight("vision.norm", (f"{_TOWER}.ln_pre.weight",), ((width,),)),
    ]
    for i in range(v.depth):
        ours, theirs = f"vision.blocks.{i}", f"{_TOWER}.transformer.layers.{i}"
        qkv = tuple(f"{theirs}.attention.{x}_proj.weight" for x in "qkv")
        gate_up = tuple(f"{theirs}.feed_forward.{name}_proj.weight" for name in ("gate", "up"))
        down = f"{theirs}.feed_forward.down_proj.weight"
        table += [
            Weight(f"{ours}.qkv", qkv, ((width, width),) * 3),
            Weight(f"{ours}.o", (f"{theirs}.attention.o_proj.weight",), ((width, width),)),
            Weight(f"{ours}.gate_up", gate_up, ((mlp, width),) * 2, pad_to=((0, padded),)),
            Weight(f"{ours}.down", (down,), ((width, mlp),), pad_to=((1, padded),)),
        ]
    for ours, theirs in (("attention_norm", "attention_norm"), ("mlp_norm", "ffn_norm")):
        name = f"{_TOWER}.transformer.layers.{{i}}.{theirs}.weight"
        table.append(Weight(f"vision.vectors.{ours}", (name,), ((width,),), stack=v.depth))
    return tuple(table)


def _projector(v: PixtralVisionConfig) -> tuple[Weight, ...]:
    width, out = v.hidden_size, v.out_hidden_size
    sources = {"fc1": ("linear_1.weight", (out, width)), "fc2": ("linear_2.weight", (out, out))}
    if v.projector_bias:
        sources |= {"fc1_bias": ("linear_1.bias", (out,)), "fc2_bias": ("linear_2.bias", (out,))}
    if v.merger_norm_eps is not None:
        joined = width * v.merge**2
        sources |= {
            "norm": ("norm.weight", (width,)),
            "merger": ("patch_merger.merging_layer.weight", (width, joined)),
        }
    return tuple(
        Weight(f"vision.projector.{ours}", (f"{_PROJECTOR}.{name}",), (shape,))
        for ours, (name, shape) in sources.items()
    )
