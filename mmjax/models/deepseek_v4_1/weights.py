# SPDX-License-Identifier: Apache-2.0
"""Weight table of DeepSeek-V4.1, in the names of DeepSeek's own checkpoints."""

from __future__ import annotations

from mmjax.models.deepseek_v4_1.config import DeepseekV41Config
from mmjax.models.deepseek_v4_1.text_config import HASH, HEAVY, SLIDING, SPARSE, DeepseekTextConfig
from mmjax.models.family import Weight

# Names of tensors with one value for each stream or mixing weight, by branch of a layer.
_BRANCHES = {"attention": "hc_attn", "mixture": "hc_ffn"}


def canonical_name(name: str) -> str:
    """The name itself: there is one layout."""
    return name


def weights(cfg: DeepseekV41Config) -> tuple[Weight, ...]:
    """Every leaf of the parameter tree and the checkpoint tensors it is made of."""
    return (*tower_weights(cfg), *text_weights(cfg.text))


def tower_weights(cfg: DeepseekV41Config) -> tuple[Weight, ...]:
    """Every leaf of `vision`: tower, aligner and learned rows; none without a tower."""
    v = cfg.vision
    if not v.depth:
        return ()
    width, mlp, depth, text = v.hidden_size, v.intermediate_size, v.depth, cfg.hidden_size
    single = {
        "patch_embed": ("vision.patch_embed.proj.weight", (width, v.patch_values)),
        "patch_bias": ("vision.patch_embed.proj.bias", (width,)),
        "norm": ("vision.norm.weight", (width,)),
        "aligner.w1": ("aligner.w1.weight", (text, width * v.merge**2)),
        "aligner.w1_bias": ("aligner.w1.bias", (text,)),
        "aligner.w2": ("aligner.w2.weight", (text, text)),
        "aligner.w2_bias": ("aligner.w2.bias", (text,)),
        "start": ("image_start", (text,)),
        "newline": ("image_newline", (text,)),
        "end": ("image_end", (text,)),
    }
    matrices = {
        "qkv": ("attn.wqkv.weight", (3 * width, width)),
        "o": ("attn.wo.weight", (width, width)),
        "gate_up": ("mlp.w1.weight", (2 * mlp, width)),
        "down": ("mlp.w2.weight", (width, mlp)),
    }
    vectors = {
        "norm1": ("norm1.weight", width),
        "norm2": ("norm2.weight", width),
        "qkv_bias": ("attn.wqkv.bias", 3 * width),
        "o_bias": ("attn.wo.bias", width),
    }
    return (
        *(Weight(f"vision.{ours}", (name,), (shape,)) for ours, (name, shape) in single.items()),
        *(
            Weight(f"vision.blocks.{i}.{ours}", (f"vision.blocks.{i}.{name}",), (shape,))
            for i in range(depth)
            for ours, (name, shape) in matrices.items()
        ),
        *(
            Weight(f"vision.vectors.{ours}", (f"vision.blocks.{{i}}.{name}",), ((length,),), stack=depth)
            for ours, (name, length) in vectors.items()
        ),
    )


def text_weights(t: DeepseekTextConfig) -> tuple[Weight, ...]:
    """Every leaf of `text`: all projections of a layer's input joined, vectors stacked over layers."""
    width, streams = t.hidden_size, t.streams
    table = [
        Weight("text.embed", ("embed.weight",), ((t.vocab_size, width),)),
        Weight("text.lm_head", ("head.weight",), ((t.vocab_size, width),)),
        Weight("text.norm", ("norm.weight",), ((width,),)),
        Weight("text.join.matrix", ("hc_head_fn",), ((streams, streams * width),)),
        Weight("text.join.base", ("hc_head_base",), ((streams,),)),
        Weight("text.join.scale", ("hc_head_scale",), ((1,),)),
    ]
    for i, (kind, router) in enumerate(zip(t.layer_kinds, t.routers, strict=True)):
        ours, theirs = f"text.layers.{i}", f"layers.{i}"
        table += [
            *_attention(t, kind, ours, f"{theirs}.attn"),
            *_experts(t, router, ours, f"{theirs}.ffn"),
            *(
                Weight(f"{ours}.{branch}_mix", (f"{theirs}.{name}_fn",), (((2 + streams) * streams, streams * width),))
                for branch, name in _BRANCHES.items()
            ),
        ]
    return (*table, *_vectors(t))


def _attention(t: DeepseekTextConfig, kind: str, ours: str, theirs: str) -> tuple[Weight, ...]:
    width, dim = t.hidden_size, t.head_dim
    compressor, indexer = f"{theirs}.compressor", f"{theirs}.indexer"
    inner = {f"{theirs}.wq_a.weight": t.q_rank, f"{theirs}.wkv.weight": dim}
    queries = {f"{theirs}.wq_b.weight": t.num_heads * dim}
    single = {
        "o_a": (f"{theirs}.wo_a.weight", (t.o_groups * t.o_rank, t.num_heads * dim // t.o_groups)),
        "o_b": (f"{theirs}.wo_b.weight", (width, t.o_groups * t.o_rank)),
    }
    if kind != SLIDING:
        entry = dim if kind == HEAVY else 2 * dim
        inner |= {f"{compressor}.wkv.weight": entry, f"{compressor}.wgate.weight": entry}
        single["entry_bias"] = (f"{compressor}.ape", (t.rate(kind), entry))
        single["entry_norm"] = (f"{compressor}.norm.weight", (dim,))
    if kind == SPARSE:
        index = 2 * t.index_dim
        inner |= {f"{indexer}.compressor.wkv.weight": index, f"{indexer}.compressor.wgate.weight": index}
        inner[f"{indexer}.weights_proj.weight"] = t.index_heads
        queries[f"{indexer}.wq_b.weight"] = t.index_heads * t.index_dim
        single["index_bias"] = (f"{indexer}.compressor.ape", (t.rate(kind), index))
        single["index_norm"] = (f"{indexer}.compressor.norm.weight", (t.index_dim,))
    return (
        Weight(f"{ours}.inner", tuple(inner), tuple((rows, width) for rows in inner.values())),
        Weight(f"{ours}.q", tuple(queries), tuple((rows, t.q_rank) for rows in queries.values())),
        *(Weight(f"{ours}.{leaf}", (name,), (shape,)) for leaf, (name, shape) in single.items()),
    )


def _experts(t: DeepseekTextConfig, router: str, ours: str, theirs: str) -> tuple[Weight, ...]:
    """The experts' matrices are stored one by one, outputs before inputs, and multiplied the other way round."""
    width, mlp, count = t.hidden_size, t.expert_width, t.num_experts
    expert, shared = f"{theirs}.experts.{{i}}", f"{theirs}.shared_experts"
    gate_up, down = ((mlp, width), (mlp, width)), ((width, mlp),)
    table = [
        Weight(f"{ours}.router", (f"{theirs}.gate.weight",), ((count, width),)),
        Weight(f"{ours}.shared_gate_up", (f"{shared}.w1.weight", f"{shared}.w3.weight"), gate_up),
        Weight(f"{ours}.shared_down", (f"{shared}.w2.weight",), down),
        Weight(
            f"{ours}.experts_gate_up",
            (f"{expert}.w1.weight", f"{expert}.w3.weight"),
            gate_up,
            stack=count,
            transposed=True,
        ),
        Weight(f"{ours}.experts_down", (f"{expert}.w2.weight",), down, stack=count, transposed=True),
    ]
    if router == HASH:
        shape = (t.vocab_size, t.experts_per_token)
        return (*table, Weight(f"{ours}.expert_of_id", (f"{theirs}.gate.tid2eid",), (shape,)))
    biases = {"router_bias": "bias"} | ({"vision_bias": "vision_bias"} if t.vision_bias else {})
    return (
        *table,
        *(Weight(f"{ours}.{leaf}", (f"{theirs}.gate.{name}",), ((count,),)) for leaf, name in biases.items()),
    )


def _vectors(t: DeepseekTextConfig) -> tuple[Weight, ...]:
    mixes = (2 + t.streams) * t.streams
    vectors = {
        "input_norm": ("attn_norm.weight", t.hidden_size),
        "post_norm": ("ffn_norm.weight", t.hidden_size),
        "q_norm": ("attn.q_norm.weight", t.q_rank),
        "kv_norm": ("attn.kv_norm.weight", t.head_dim),
        "sinks": ("attn.attn_sink", t.num_heads),
    }
    for branch, name in _BRANCHES.items():
        vectors[f"{branch}_base"] = (f"{name}_base", mixes)
        vectors[f"{branch}_scale"] = (f"{name}_scale", 3)
    return tuple(
        Weight(f"text.vectors.{leaf}", (f"layers.{{i}}.{name}",), ((length,),), stack=t.num_layers)
        for leaf, (name, length) in vectors.items()
    )
