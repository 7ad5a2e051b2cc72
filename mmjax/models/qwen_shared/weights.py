# SPDX-License-Identifier: Apache-2.0
"""Weight tables of what the Qwen families share, in the names that published checkpoints carry."""

from __future__ import annotations

from mmjax.models.family import Weight
from mmjax.models.qwen_shared.config import QwenConfig, QwenVisionConfig

# transformers 5 names the same tensors as its modules nest; published checkpoints are older.
_NESTED = (("model.visual.", "visual."), ("model.language_model.", "model."))


def canonical_name(name: str) -> str:
    """The published name (`visual.*`, `model.*`, `lm_head.weight`) of a tensor in either layout."""
    for nested, published in _NESTED:
        if name.startswith(nested):
            return published + name.removeprefix(nested)
    return name


def text_weights(cfg: QwenConfig) -> tuple[Weight, ...]:
    """Every leaf of `text`: q, k and v joined, gate and up joined, vectors stacked over layers."""
    t = cfg.text
    width, mlp, padded = t.hidden_size, t.intermediate_size, t.mlp_width
    q, kv = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
    table = [
        Weight("text.embed", ("model.embed_tokens.weight",), ((t.vocab_size, width),)),
        Weight("text.norm", ("model.norm.weight",), ((width,),)),
    ]
    if not t.tie_word_embeddings:
        table.append(Weight("text.lm_head", ("lm_head.weight",), ((t.vocab_size, width),)))
    for i in range(t.num_layers):
        ours, theirs = f"text.layers.{i}", f"model.layers.{i}"
        attention, mlp_name = f"{theirs}.self_attn", f"{theirs}.mlp"
        table += [
            Weight(
                f"{ours}.qkv",
                tuple(f"{attention}.{x}_proj.weight" for x in "qkv"),
                ((q, width), (kv, width), (kv, width)),
            ),
            Weight(f"{ours}.o", (f"{attention}.o_proj.weight",), ((width, q),)),
            Weight(
                f"{ours}.gate_up",
                (f"{mlp_name}.gate_proj.weight", f"{mlp_name}.up_proj.weight"),
                ((mlp, width), (mlp, width)),
                pad_to=((0, padded),),
            ),
            Weight(f"{ours}.down", (f"{mlp_name}.down_proj.weight",), ((width, mlp),), pad_to=((1, padded),)),
        ]
    layers = "model.layers.{i}"
    biases = tuple(f"{layers}.self_attn.{x}_proj.bias" for x in "qkv")
    norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    table.append(Weight("text.vectors.qkv_bias", biases, ((q,), (kv,), (kv,)), stack=t.num_layers))
    table += [
        Weight(f"text.vectors.{ours}", (f"{layers}.{theirs}.weight",), ((width,),), stack=t.num_layers)
        for ours, theirs in norms.items()
    ]
    return tuple(table)


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


def tower_attention(vision: QwenVisionConfig) -> tuple[Weight, ...]:
    """Matrices and biases of every block's attention, which checkpoints store with q, k and v joined."""
    width, depth = vision.hidden_size, vision.depth
    matrices = {"qkv": ("attn.qkv.weight", (3 * width, width)), "proj": ("attn.proj.weight", (width, width))}
    biases = {"qkv_bias": ("attn.qkv.bias", (3 * width,)), "proj_bias": ("attn.proj.bias", (width,))}
    return (
        *(
            Weight(f"vision.blocks.{i}.{ours}", (f"visual.blocks.{i}.{name}",), (shape,))
            for i in range(depth)
            for ours, (name, shape) in matrices.items()
        ),
        *(
            Weight(f"vision.vectors.{ours}", (f"visual.blocks.{{i}}.{name}",), (shape,), stack=depth)
            for ours, (name, shape) in biases.items()
        ),
    )
