# SPDX-License-Identifier: Apache-2.0
"""What `llm.stats()` returns: plain numbers, a short text, a table in notebooks."""

from __future__ import annotations

import html
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kernels_pallas.dispatch import choices
from mmjax.models.family import Family, ModelConfig

OWN = "the family's own"  # attention that is not one of the shared implementations


@dataclass(frozen=True)
class Stats:
    """A snapshot of a running engine.

    Attributes:
      device: its name; `attention`: which implementation serves each operation, see `attention_in_use`.
      budgets: A to D and what follows from them.
      items: row cache accounting, items encoded and refused, padding of encoder buckets.
      pages: KV pages by state, prefix reuse.
      queues: requests running, waiting and embedding; `preemptions` since the start.
      steps: number, median and 99th percentile of their host time in milliseconds.
      tokens: median and 99th percentile of the milliseconds between two tokens of an answer.
      compiles: `at_start` steps in `seconds`; `since` the engine was ready, with `names`.
    """

    device: str
    attention: dict[str, Any]
    budgets: dict[str, Any]
    items: dict[str, Any]
    pages: dict[str, Any]
    queues: dict[str, Any]
    steps: dict[str, Any]
    tokens: dict[str, Any]
    compiles: dict[str, Any]

    def summary(self) -> str:
        """A few lines for people."""
        cache, pages = self.items["cache"], self.pages
        return "\n".join(
            [
                f"device    {self.device}; attention {', '.join(f'{k}: {v}' for k, v in self.attention.items())}",
                f"compiled  {self.compiles['at_start']} steps in {self.compiles['seconds']:.1f} s, "
                f"{self.compiles['since']} since",
                f"items     {self.items.get('items_encoded', 0)} encoded, {cache['hits']} cache hits, "
                f"{self.items['padding']['waste']:.0%} padding",
                f"pages     {pages['in_use']} in use, {pages['cached']} cached, {pages['free']} free; "
                f"{pages['reused_tokens']} prompt tokens reused",
                f"steps     {self.steps['count']}, median {self.steps['median_ms']:.1f} ms; "
                f"between tokens {self.tokens['median_ms']:.1f} ms, 99th percentile {self.tokens['p99_ms']:.1f} ms",
            ]
        )

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><th>{html.escape(part)}</th><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
            for part, values in asdict(self).items()
            if isinstance(values, dict)
            for name, value in values.items()
        ]
        return f"<table>{''.join(rows)}</table>"


def attention_in_use(family: Family, cfg: ModelConfig, platform: str, page: int) -> dict[str, str]:
    """The implementation of each operation that the model runs; text that attends by itself is "the family's own"."""
    tower = choices(platform, cfg.dtype, cfg.vision_head_dim)
    windowed = {"windowed": tower.windowed} if cfg.window_capacity else {}
    if not family.keeps_keys_and_values(cfg):
        return {"packed": tower.packed, **windowed, "prefill": OWN, "decode": OWN}
    text = choices(platform, cfg.dtype, cfg.head_dim, page=page, group=cfg.num_heads // cfg.num_kv_heads)
    return {"packed": tower.packed, **windowed, "prefill": text.prefill, "decode": text.decode}


def _percentiles(seconds: Collection[float]) -> dict[str, float]:
    times = np.asarray(seconds) * 1e3 if seconds else np.zeros(1)
    return {"median_ms": float(np.median(times)), "p99_ms": float(np.percentile(times, 99))}


def collect_stats(service: Any, cfg: Any, device: Any) -> Stats:
    """Reads a running `Service` between two steps."""

    def read() -> Stats:
        machine, scheduler, trace = service.machine, service.scheduler, service.engine.trace
        return Stats(
            device=device.device_kind,
            attention=attention_in_use(machine.encoder.family, cfg, device.platform, service.config.tokens_per_block),
            budgets=service.budgets.as_dict(),
            items=service.items.stats(),
            pages=service.pages.stats()._asdict(),
            queues={
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "embedding": len(scheduler.embedding),
                "preemptions": scheduler.preemptions,
            },
            steps={"count": trace.steps, **_percentiles(trace.times)},
            tokens=_percentiles(trace.gaps),
            compiles={
                "at_start": len(machine.encoder.executables())
                + len(machine.text.executables() if machine.text else ()),
                "seconds": machine.compile_seconds,
                "since": machine.counter.count,
                "names": list(machine.counter.names),
            },
        )

    return service.call(read)
