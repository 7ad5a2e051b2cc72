# SPDX-License-Identifier: Apache-2.0
"""Weight tables of what the Qwen families share, in the names that published checkpoints carry."""

from __future__ import annotations

from mmjax.models.family import Weight
from mmjax.models.qwen_shared.config import QwenVisionConfig

# transformers 5 names the same tensors as its modules nest; published checkpoints are older.
_NESTED = (("model.visual.", "visual."), ("model.language_model.", "model."))


def canonical_name(name: str) -> str:
    """The published name (`visual.*`, `model.*`, `lm_head.weight`) of a tensor in either layout."""
    for nested, published in _NESTED:
        if name.startswith(nested):
            return published + name.removeprefix(nested)
    return name


def tower_ends(vision: QwenVisionConfig, norm_bias: bool) -> tuple[Weight, ...]:
    """The patch embedding, a convolution read as a matrix, and the merger."""
    width, out = vision.hidden_size, vision.out_hidden_size
    joined = width * vision.merge**2
    kernel = (width, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    merger = {
        "norm": ("ln_q.weight", (width,)),
        "norm_bias": ("ln_q.bias", (width,)),
        "fc1": ("mlp.0.weight", (joined, joined)),
        "fc1_bias": ("mlp.0.bias", (joined,)),
        "fc2": ("mlp.2.weight", (out, joined)),
        "fc2_bias": ("mlp.2.bias", (out,)),
    }
    if not norm_bias:
        del merger["norm_bias"]
    return (
        Weight(
            "vision.patch_embed", ("visual.patch_embed.proj.weight",), (kernel,), shape=(width, vision.patch_values)
        ),
        *(
            Weight(f"vision.merger.{ours}", (f"visual.merger.{name}",), (shape,))
            for ours, (name, shape) in merger.items()
        ),
    )


def tower_attention(vision: QwenVisionConfig, tower: str = "visual") -> tuple[Weight, ...]:
    """Matrices and biases of every block's attention, which checkpoints store with q, k and v joined.

    Args:
      tower: what the names of the tower's tensors start with.
    """
    width, depth = vision.hidden_size, vision.depth
    matrices = {"qkv": ("attn.qkv.weight", (3 * width, width)), "proj": ("attn.proj.weight", (width, width))}
    biases = {"qkv_bias": ("attn.qkv.bias", (3 * width,)), "proj_bias": ("attn.proj.bias", (width,))}
    return (
        *(
            Weight(f"vision.blocks.{i}.{ours}", (f"{tower}.blocks.{i}.{name}",), (shape,))
            for i in range(depth)
            for ours, (name, shape) in matrices.items()
        ),
        *(
            Weight(f"vision.vectors.{ours}", (f"{tower}.blocks.{{i}}.{name}",), (shape,), stack=depth)
            for ours, (name, shape) in biases.items()
        ),
    )
