# SPDX-License-Identifier: Apache-2.0
"""Requests that never met a caller, for benchmarks that drive a scheduler or a runner directly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmjax.engine.detokenizer import Detokenizer
from mmjax.engine.handle import Handle
from mmjax.engine.request import Request, Status
from mmjax.engine.stop import StopChecker
from mmjax.inputs.prepare import prepare_prompt
from mmjax.inputs.prompt import ItemInput
from mmjax.models.family import Model
from mmjax.sampling_params import SamplingParams

_ROOM = 1 << 20


def make_request(
    model: Model, name: str, ids: np.ndarray, items: Sequence[ItemInput] = (), page: int | None = None
) -> Request:
    """A greedy request over a compact prompt, with the keys of its KV pages if `page` is given."""
    params = SamplingParams(max_tokens=_ROOM, temperature=0.0, ignore_eos=True)
    prompt = prepare_prompt(ids, items, model.processor, vocab_size=model.cfg.vocab_size)
    return Request(
        id=name,
        prompt=prompt,
        params=params,
        handle=Handle(name, _nobody_cancels),
        checker=StopChecker(params, Detokenizer(model.tokenizer), (), _ROOM),
        max_tokens=_ROOM,
        seed=0,
        key_tokens=prompt.key_tokens() if page else [],
        block_keys=prompt.block_keys(page) if page else [],
    )


def place(requests: Sequence[Request], pages_each: int, rng: np.random.Generator) -> None:
    """Gives each a slot and pages of its own, scattered over the pool as in a long-running engine."""
    blocks = rng.permutation(len(requests) * pages_each).reshape(len(requests), pages_each)
    for slot, request in enumerate(requests):
        request.slot, request.status, request.table = slot, Status.RUNNING, blocks[slot].tolist()


def _nobody_cancels(request_id: str) -> None:
    raise AssertionError(f"{request_id} was cancelled")
