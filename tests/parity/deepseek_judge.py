# SPDX-License-Identifier: Apache-2.0
"""transformers' DeepSeek-V4 decoder, shown pictures: rows in the place of embeddings, and a routers' bias for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

import numpy as np
import torch
from safetensors.numpy import load_file
from torch.nn import functional


class DeepseekJudge:
    """The decoder of a tiny checkpoint. transformers routes pictures as text; this adds what V4.1 does for them."""

    def __init__(self, checkpoint):
        self.model = checkpoint.model
        tensors = load_file(checkpoint.path / "model.safetensors")
        self._bias = {
            int(name.split(".")[1]): torch.from_numpy(bias.copy())
            for name, bias in tensors.items()
            if name.endswith("vision_bias")
        }

    @torch.no_grad()
    def run(
        self, ids: Sequence[int], rows: np.ndarray | None = None, at: Sequence[int] = ()
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Streams behind every layer [T, streams, E], and logits [T, V]; `rows` stand at the positions `at`."""
        layers: list[np.ndarray] = []
        handles = [
            layer.register_forward_hook(lambda module, args, out: layers.append(out[0].numpy()))
            for layer in self.model.model.layers
        ]
        try:
            with self._shown(rows, at, len(ids)):
                logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()
        finally:
            for handle in handles:
                handle.remove()
        return layers, logits

    def greedy(
        self, ids: Sequence[int], count: int, banned: Sequence[int], rows: np.ndarray | None = None, at=()
    ) -> tuple[list[int], np.ndarray]:
        """`count` tokens, everything computed anew for each, and the margins of the best before the second best."""
        tokens, margins = [], []
        for _ in range(count):
            last = self.run([*ids, *tokens], rows, at)[1][-1]
            last[list(banned)] = -np.inf
            second, best = np.sort(last)[-2:]
            tokens.append(int(last.argmax()))
            margins.append(best - second)
        return tokens, np.array(margins)

    @contextmanager
    def _shown(self, rows: np.ndarray | None, at: Sequence[int], length: int) -> Iterator[None]:
        if rows is None:
            yield
            return
        is_row = torch.zeros(length, dtype=torch.bool)
        is_row[list(at)] = True

        def put(module, args, out):
            out = out.clone()
            out[0, is_row] = torch.from_numpy(np.array(rows))
            return out

        handle = self.model.model.embed_tokens.register_forward_hook(put)
        routers = {i: self.model.model.layers[i].mlp.gate for i in self._bias}
        for i, router in routers.items():
            router.forward = MethodType(_biased_by_kind(self._bias[i], is_row), router)
        try:
            yield
        finally:
            handle.remove()
            for router in routers.values():
                del router.forward


def _biased_by_kind(vision_bias: torch.Tensor, is_row: torch.Tensor):
    """A router's forward with `vision_bias` in the place of its own bias where `is_row`."""

    def forward(self, hidden_states):
        logits = functional.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        scores = self.score_fn(logits)
        bias = torch.where(is_row[:, None], vision_bias, self.e_score_correction_bias)
        indices = torch.topk(scores + bias, self.top_k, dim=-1).indices
        weights = scores.gather(1, indices)
        return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, indices

    return forward
