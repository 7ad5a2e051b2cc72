# SPDX-License-Identifier: Apache-2.0
"""The least that each piece of work can cost: operations and bytes, counted from the config, over measured ceilings.

A multiply-add is two operations. Matrices count at the sizes that the checkpoint stores, without padding. Norms, rotary
angles and activations are left out: they are a small share of the operations, and fused they need no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mmjax.inputs.items import ItemPlan
from mmjax.models.family import Family, ModelConfig

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Work:
    """Operations of matrix products and attention, and bytes between the device's memory and its units."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches: `matmul` in operations a second, `copy` in bytes read plus written a second."""

    matmul: float
    copy: float

    def seconds(self, *works: Work) -> float:
        """The floor of works that run one after another: each takes as long as the slower of its two parts."""
        return sum(max(work.operations / self.matmul, work.bytes / self.copy) for work in works)


def matrix_values(family: Family, cfg: ModelConfig, prefix: str) -> int:
    """Values of the matrices whose path begins with `prefix`, as the checkpoint stores them."""
    tables = (w for w in family.weights(cfg) if w.path.startswith(prefix) and not w.stack)
    return sum(prod(shape) for table in tables for shape in table.source_shapes if len(shape) > 1)


def encoder_work(family: Family, cfg: ModelConfig, plans: Sequence[ItemPlan]) -> Work:
    """The tower over some items."""
    vision = cfg.vision
    patches, rows = sum(plan.encoder_tokens for plan in plans), sum(plan.rows for plan in plans)
    per_patch = matrix_values(family, cfg, "vision.patch_embed") + matrix_values(family, cfg, "vision.blocks.")
    per_row = matrix_values(family, cfg, "vision.merger.") + matrix_values(family, cfg, "vision.deepstack.")
    full_blocks = len(vision.full_attention_blocks) if cfg.window_capacity else vision.depth
    pairs = full_blocks * sum(length**2 for plan in plans for length in plan.contexts)
    pairs += (vision.depth - full_blocks) * sum(_window_pairs(cfg, plan) for plan in plans)
    operations = 2 * (per_patch * patches + per_row * rows) + 4 * vision.num_heads * cfg.vision_head_dim * pairs
    itemsize = _ITEMSIZE[cfg.dtype]
    return Work(operations, itemsize * (per_patch + per_row + rows * cfg.row_width) + patches * cfg.patch_values)


def _window_pairs(cfg: ModelConfig, plan: ItemPlan) -> int:
    """Pairs of patches that see each other in one windowed block; windows on the far edges may be cut."""
    if not cfg.window_capacity:
        return 0
    side = round(cfg.window_capacity**0.5)
    frames, *sides = plan.grid
    down, across = (sum(min(side, size - at) ** 2 for at in range(0, size, side)) for size in sides)
    return frames * down * across


def prefill_work(family: Family, cfg: ModelConfig, chunks: Sequence[tuple[int, int]]) -> Work:
    """The decoder over (prefix, new) tokens of each sequence in one step; logits for the last token of each.

    Of a mixture of experts, a token multiplies with those it is routed to, and those of any token are read.
    """
    layers, head, itemsize = matrix_values(family, cfg, "text.layers."), _head_values(cfg), _ITEMSIZE[cfg.dtype]
    tokens = sum(new for _, new in chunks)
    experts, used, touched_share = _experts(cfg, tokens)
    pairs = sum(prefix * new + new * (new + 1) // 2 for prefix, new in chunks)
    operations = 2 * ((layers - (1 - used) * experts) * tokens + head * len(chunks))
    operations += 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim * pairs
    touched = sum(prefix + new for prefix, new in chunks)
    read = layers - (1 - touched_share) * experts
    return Work(operations, itemsize * (read + head + touched * _kv_values(cfg)))


def decode_work(family: Family, cfg: ModelConfig, batch: int, context: int) -> Work:
    """One token of each of `batch` sequences that have `context` tokens, the new one included."""
    return prefill_work(family, cfg, [(context - 1, 1)] * batch)


def _experts(cfg: ModelConfig, tokens: int) -> tuple[int, float, float]:
    """Values of all experts, the share that a token uses, and the share that one of `tokens` uses.

    The last is what to expect where every expert is as likely as any other, and tokens choose by themselves.
    """
    moe = getattr(cfg.text, "moe", None)
    if moe is None:
        return 0, 1.0, 1.0
    values = 3 * len(moe.sparse_layers) * moe.num_experts * moe.intermediate_size * cfg.hidden_size
    used = moe.experts_per_token / moe.num_experts
    return values, used, 1 - (1 - used) ** tokens


def _head_values(cfg: ModelConfig) -> int:
    return cfg.vocab_size * cfg.hidden_size


def _kv_values(cfg: ModelConfig) -> int:
    """Keys and values of one token over all layers."""
    return 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim
