# SPDX-License-Identifier: Apache-2.0
"""Claim: the mixture of experts equals transformers' sparse block, and padding can't reach real tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tolerances import LOGITS
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

from mmjax.layers.moe import moe_mlp, route

EXPERTS, WIDTH, INNER, TOKENS = 8, 48, 32, 21


class Routing(NamedTuple):
    experts_per_token: int = 3
    norm_topk: bool = True


mixture = jax.jit(moe_mlp, static_argnums=2)


@pytest.fixture(scope="module")
def block():
    config = Qwen3VLMoeTextConfig(
        hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=3
    )
    config._experts_implementation = "eager"
    made = Qwen3VLMoeTextSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def layer_of(block) -> dict:
    """Our leaves of the block's parameters."""
    return {
        "router": jnp.asarray(block.gate.weight.detach().numpy()),
        "experts_gate_up": jnp.asarray(block.experts.gate_up_proj.detach().mT.numpy()),
        "experts_down": jnp.asarray(block.experts.down_proj.detach().mT.numpy()),
    }


def tokens(count: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, WIDTH), np.float32)


@pytest.mark.parametrize("count", [1, 2, TOKENS])
def test_equals_transformers(block, count):
    x = tokens(count)
    with torch.no_grad():
        expected = block(torch.from_numpy(x)[None])[0].numpy()
    np.testing.assert_allclose(mixture(x, layer_of(block), Routing()), expected, atol=LOGITS)


def test_all_tokens_to_one_set_of_experts(block):
    """The largest group that can be: every token the same."""
    x = np.repeat(tokens(1), TOKENS, axis=0)
    out = np.asarray(mixture(x, layer_of(block), Routing()))
    assert np.array_equal(out, np.repeat(out[:1], TOKENS, axis=0))


@pytest.mark.parametrize("norm_topk", [True, False])
def test_weights_are_shares_of_a_softmax_over_all_experts(norm_topk):
    """Logits of 3, 2, 1, 0 with two experts: exp(3) and exp(2) over their own sum, or over that of all four."""
    router = np.array([[1.0], [3.0], [0.0], [2.0]], np.float32)
    experts, weights = route(jnp.ones((1, 1)), router, Routing(2, norm_topk))
    assert experts.tolist() == [[1, 3]]
    total = np.exp([3, 2] if norm_topk else [3, 2, 1, 0]).sum()
    np.testing.assert_allclose(weights, [np.exp([3, 2]) / total], rtol=1e-6)


def test_padding_may_hold_anything(block):
    real = 13
    clean, dirty = tokens(), tokens()
    clean[real:], dirty[real:] = 0, np.nan
    outs = [np.asarray(mixture(x, layer_of(block), Routing()))[:real] for x in (clean, dirty)]
    assert np.array_equal(*outs)
    assert np.isfinite(outs[0]).all()


def test_gradients_reach_tokens_and_parameters(block):
    def loss(x, layer):
        return jnp.square(moe_mlp(x, layer, Routing())).sum()

    gradients = jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(tokens(), layer_of(block)))
    assert len(gradients) == 4
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in gradients)
