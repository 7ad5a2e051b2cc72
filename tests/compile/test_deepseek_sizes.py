# SPDX-License-Identifier: Apache-2.0
"""Claim: DeepSeek-V4.1 at its published size in bfloat16 traces through every step; its pages are written in place."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from conversion.layout import leaves
from kernels_pallas.dispatch import PagedDecode, PagedPrefill, reference_attention, vision_ops
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey
from mmjax.layers.fusion import StepTokens
from mmjax.models.deepseek_v4_1 import FAMILY
from mmjax.models.deepseek_v4_1.attention import attention

TOKENS, SEQUENCES, TABLE, PAGE, BLOCKS = 256, 4, 64, 32, 100
LAYERS = 8

CONFIG = {
    "model_type": "deepseek_v4_1",
    "dtype": "bfloat16",
    "text_config": {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0],
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "num_hash_layers": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "use_vision_bias": True,
        "max_position_embeddings": 1048576,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    },
}


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.fixture(scope="module")
def cfg():
    return FAMILY.config(CONFIG)


@pytest.fixture(scope="module")
def spec(cfg):
    return FAMILY.spec(cfg)


def test_every_leaf_has_its_tensors(cfg, spec):
    plan = leaves(FAMILY.weights(cfg), spec)
    assert len(plan) == len(jax.tree.leaves(spec))
    names = [piece.name for leaf in plan for piece in leaf.pieces]
    assert len(names) == len(set(names))
    assert {"vision.blocks.31.mlp.w2.weight", "layers.7.ffn.experts.255.w3.weight", "hc_head_fn"} < set(names)


PAGES = {
    "prefill": PagedPrefill(
        cu_seqlens=ints(SEQUENCES + 1),
        prefix_lens=ints(SEQUENCES),
        block_tables=ints(SEQUENCES, TABLE),
        slots=ints(TOKENS),
    ),
    "decode": PagedDecode(seq_lens=ints(TOKENS), block_tables=ints(TOKENS, TABLE), slots=ints(TOKENS)),
}


@pytest.mark.parametrize("step", PAGES)
def test_the_decoder(cfg, spec, step):
    hidden = jax.ShapeDtypeStruct((TOKENS, 5120), jnp.bfloat16)
    kv = tuple(
        jax.ShapeDtypeStruct((BLOCKS, parts, heads, PAGE, width), jnp.bfloat16)
        for parts, heads, width in FAMILY.state_shapes(cfg)
    )
    tokens = StepTokens(ints(TOKENS), jax.ShapeDtypeStruct((TOKENS,), jnp.bool_))
    lowered = jax.jit(FAMILY.forward, static_argnums=(1, 6)).lower(
        spec["text"], cfg, hidden, ints(1, TOKENS), kv, PAGES[step], reference_attention(), None, tokens
    )
    out, pages = lowered.out_info
    assert (out.shape, out.dtype) == ((TOKENS, 5120), jnp.bfloat16)
    assert [(page.shape, page.dtype) for page in pages] == [(page.shape, page.dtype) for page in kv]
    # Kinds of layers: a window by id and by score (2), sparse entries by id and by score (2), heavy entries (1).
    assert lowered.as_text().count("func.func private @_layer") == 5


def test_the_tower(cfg, spec):
    rows = 6000
    bucket = EncoderBucket(EncoderGraphKey(9189, 8), 0, rows)
    table = jax.ShapeDtypeStruct((3, 256), jnp.float32)
    lowered = jax.jit(FAMILY.encode, static_argnums=(1, 4)).lower(
        spec["vision"], cfg, FAMILY.vision_inputs(cfg, bucket), table, vision_ops("cpu")
    )
    assert (lowered.out_info.shape, lowered.out_info.dtype) == ((rows, 5120), jnp.bfloat16)
    assert lowered.as_text().count("func.func private @_block") == 1


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 12,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 8,
}


@pytest.mark.parametrize("step", PAGES)
@pytest.mark.parametrize("layer", [0, 2, 3])  # one of each kind
def test_pages_are_written_where_they_are(step, layer):
    cfg = FAMILY.config(CONFIG | {"dtype": "float32", "text_config": CONFIG["text_config"] | SMALL})
    text = FAMILY.spec(cfg)["text"]
    vectors = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in text["vectors"].items()}
    kind, width = cfg.text.layer_kinds[layer], FAMILY.state_shapes(cfg)[layer][2]
    many = 1 << 15
    pages = jax.ShapeDtypeStruct((many, 1, 1, PAGE, width), jnp.float32)
    run = jax.jit(partial(attention, t=cfg.text, kind=kind), donate_argnums=5)
    x, frequencies = jax.ShapeDtypeStruct((TOKENS, 64), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    compiled = run.lower(x, text["layers"][layer], vectors, frequencies, ints(TOKENS), pages, PAGES[step]).compile()
    memory, size = compiled.memory_analysis(), many * PAGE * width * 4
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 2
