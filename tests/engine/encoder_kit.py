# SPDX-License-Identifier: Apache-2.0
"""Small budgets, items and schedulers for the tests of the encoder plane."""

from __future__ import annotations

from mmjax.encoder.buckets import BucketLadder, EncoderLoad
from mmjax.encoder.budgets import EncoderBudgets, Readiness
from mmjax.encoder.scheduler import EncodePlan, MultimodalItemScheduler
from mmjax.encoder.state import EncoderItem
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey

ROW_BYTES = 4
PROMPT = 100  # long enough for every item of these tests


def make_budgets(
    *, items=8, tokens=100, rows=1000, readiness="request", retain=True, output_rows=None
) -> EncoderBudgets:
    """A = `items`, B = `tokens`, a pool of `rows` rows of 4 bytes; C is `output_rows`, or the pool."""
    output = (rows if output_rows is None else output_rows) * ROW_BYTES
    return EncoderBudgets(
        readiness=Readiness(readiness),
        batch_size=items,
        base_num_tokens=tokens,
        max_num_tokens=tokens,
        largest_item=tokens,
        item_tokens={"image": tokens},
        attention_capacity={"full": tokens},
        max_output_rows=rows,
        row_bytes=ROW_BYTES,
        output_bytes=output,
        reuse_bytes=rows * ROW_BYTES if retain else 0,
        capacity_rows=rows,
    )


def make_ladder(tokens=1000, contexts=100, windows=100, rows=1000) -> BucketLadder:
    """One bucket that holds everything."""
    return BucketLadder([EncoderBucket(EncoderGraphKey(tokens, contexts), windows, rows)])


def make_scheduler(policy="default", ladder=None, **budgets) -> MultimodalItemScheduler:
    return MultimodalItemScheduler(make_budgets(**budgets), ladder or make_ladder(), policy)


def make_items(*costs, rows=1, keys=None) -> list[EncoderItem]:
    """Items of `costs` tokens at positions 0, 1, ...; without `keys` nobody shares them."""
    rows = [rows] * len(costs) if isinstance(rows, int) else rows
    keys = keys or [None] * len(costs)
    loads = [EncoderLoad(1, cost, 1, 0, count) for cost, count in zip(costs, rows, strict=True)]
    return [EncoderItem(key, load, i, i) for i, (key, load) in enumerate(zip(keys, loads, strict=True))]


def spread(*spans, tokens=4, keys=None) -> list[EncoderItem]:
    """Items whose rows fill the prompt positions first..last of each span."""
    keys = keys or [None] * len(spans)
    return [
        EncoderItem(key, EncoderLoad(1, tokens, 1, 0, last - first + 1), first, last)
        for key, (first, last) in zip(keys, spans, strict=True)
    ]


def selected(plan: EncodePlan) -> dict[str, list[int]]:
    """The plan as {request: items to encode}."""
    found: dict[str, list[int]] = {}
    for item in plan.items:
        found.setdefault(item.request_id, []).append(item.item)
    return found


def select(scheduler: MultimodalItemScheduler, *request_ids: str) -> tuple[dict[str, list[int]], list[str], EncodePlan]:
    """One step over whole prompts: {request: items}, the requests that may prefill, and the plan."""
    plan = scheduler.plan([(request_id, 0, PROMPT) for request_id in request_ids])
    return selected(plan), [r for r in request_ids if plan.chunk_end[r] == PROMPT], plan
