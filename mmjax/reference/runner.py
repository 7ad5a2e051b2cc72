# SPDX-License-Identifier: Apache-2.0
"""The judge's device side: the family's own functions with plain masks, float32, one sequence, no pages, no buckets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from kernels_pallas.dispatch import reference_attention, reference_vision_ops
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey, ItemPlan, ProcessedItem
from mmjax.inputs.prompt import PreparedPrompt
from mmjax.layers.sampling import Sampled, SamplerState, SamplingInputs, sample
from mmjax.models.family import Family, ModelConfig, Processor
from mmjax.models.steps import embed_tokens
from mmjax.sampling_params import SamplingRow, banned_mask, sampling_arrays

# Text is padded behind its end to a multiple of this, so that an answer does not compile once per token. The causal
# mask keeps padding from every real position.
LENGTH_STEP = 64


class ReferenceRunner:
    """Recomputes everything for every token. Matrix products run at the highest precision."""

    def __init__(
        self,
        family: Family,
        cfg: ModelConfig,
        params: dict,
        processor: Processor,
        *,
        device: jax.Device,
        banned_ids: Sequence[int] = (),
    ):
        if cfg.dtype != "float32":
            raise ValueError(f"the reference computes in float32, the config says {cfg.dtype}")
        self.family, self.cfg, self.params, self.processor, self.device = family, cfg, params, processor, device
        self._table = jax.device_put(processor.pixel_table(), device)
        self._encode = jax.jit(partial(_encode, family, cfg))
        self._logits = jax.jit(partial(_logits, family, cfg))
        self._sample = jax.jit(sample)
        self._banned = banned_mask(banned_ids, cfg.vocab_size)

    def encode(self, item: ProcessedItem) -> np.ndarray:
        """Rows [R, row_width] of one item, encoded alone in a bucket of exactly its size."""
        inputs = self.processor.pack([item], exact_bucket(item.plan))
        with jax.default_matmul_precision("highest"):
            return np.asarray(self._encode(self.params["vision"], self._table, inputs))

    def logits(self, prompt: PreparedPrompt, rows: Sequence[np.ndarray], output_ids: Sequence[int]) -> np.ndarray:
        """float32 logits [len(output_ids) + 1, V]: behind the prompt and behind every output token."""
        length = len(prompt.token_ids) + len(output_ids)
        padded = -(-length // LENGTH_STEP) * LENGTH_STEP
        ids = np.zeros(padded, np.int32)
        ids[:length] = np.concatenate([prompt.token_ids, np.asarray(output_ids, np.int32)])
        positions = np.zeros((self.cfg.position_axes, padded), np.int32)
        positions[:, : len(prompt.token_ids)] = prompt.positions
        tail = np.arange(len(prompt.token_ids), length, dtype=np.int32) + np.int32(prompt.position_delta)
        positions[:, len(prompt.token_ids) : length] = tail
        pool, row_index = self._pool(prompt, rows, padded)
        ids[row_index < len(pool)] = 0
        at = np.zeros(-(-(len(output_ids) + 1) // LENGTH_STEP) * LENGTH_STEP, np.int32)
        at[: len(output_ids) + 1] = np.arange(len(prompt.token_ids) - 1, length)
        with jax.default_matmul_precision("highest"):
            out = self._logits(self.params["text"], pool, ids, row_index, positions, at)
        return np.asarray(out)[: len(output_ids) + 1]

    def sample(
        self, logits: np.ndarray, row: SamplingRow, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> Sampled:
        """One draw of the engine's own sampler from logits [1, V], after the given prompt and output."""
        vocab_size = self.cfg.vocab_size
        seen, counts = np.zeros((1, vocab_size), bool), np.zeros((1, vocab_size), np.int32)
        seen[0, np.asarray(prompt_ids)[np.asarray(prompt_ids) < vocab_size]] = True
        np.add.at(counts[0], np.asarray(output_ids, np.int64), 1)
        inputs = SamplingInputs(**sampling_arrays([row], 1, vocab_size))
        state = SamplerState(prompt_seen=seen, output_counts=counts)
        sampled, _ = self._sample(logits, inputs, state, np.zeros(1, np.int32), self._banned)
        return jax.tree.map(np.asarray, sampled)

    def _pool(self, prompt: PreparedPrompt, rows: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
        total = sum(len(r) for r in rows)
        pool = np.zeros((max(LENGTH_STEP, -(-total // LENGTH_STEP) * LENGTH_STEP), self.cfg.row_width), np.float32)
        row_index = np.full(length, len(pool), np.int32)
        start = 0
        for item, item_rows in zip(prompt.items, rows, strict=True):
            pool[start : start + len(item_rows)] = item_rows
            row_index[item.row_positions] = start + np.arange(len(item_rows))
            start += len(item_rows)
        return pool, row_index


def exact_bucket(plan: ItemPlan) -> EncoderBucket:
    """A bucket that one item fills."""
    return EncoderBucket(EncoderGraphKey(plan.encoder_tokens, len(plan.contexts)), plan.windows, plan.rows)


def _encode(family: Family, cfg: ModelConfig, params: dict, table, inputs):
    return family.encode(params, cfg, inputs, table, reference_vision_ops())


def _logits(family: Family, cfg: ModelConfig, params: dict, pool, ids, row_index, positions, at):
    hidden, deepstack, tokens = embed_tokens(family, cfg, params, pool, ids, row_index)
    kv = tuple(() for _ in range(cfg.num_layers))
    hidden, _ = family.forward(params, cfg, hidden, positions, kv, None, reference_attention(), deepstack, tokens)
    return family.logits(params, cfg, hidden[at])
