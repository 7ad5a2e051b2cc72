# SPDX-License-Identifier: Apache-2.0
"""Which encoder sizes are compiled, and the smallest of them that a batch fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mmjax.bucket_sizes import sizes_that_reach
from mmjax.encoder.budgets import EncoderBudgets, max_output_rows
from mmjax.errors import ConfigError
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey
from mmjax.models.family import ModelConfig, Processor

MIN_TOKENS = 256  # below this a step costs what its kernel launches cost
TOKENS_PER_CONTEXT = 64  # small pictures have 64 patches or more; smaller ones go up a bucket
MIN_CONTEXTS = 8
WINDOW_SLACK = 1.5  # photos need 1.0 to 1.15 window rows per full window, small grids more


class EncoderLoad(NamedTuple):
    """What a batch of items needs: `tokens` before merging, attention `contexts`, `windows` and output `rows`."""

    items: int = 0
    tokens: int = 0
    contexts: int = 0
    windows: int = 0
    rows: int = 0

    @classmethod
    def total(cls, loads: Iterable[EncoderLoad]) -> EncoderLoad:
        return cls(*map(sum, zip(cls(), *loads, strict=True)))


class BucketLadder:
    """The compiled encoder sizes, smallest first."""

    def __init__(self, buckets: Sequence[EncoderBucket]):
        if not buckets:
            raise ConfigError("an encoder needs at least one bucket")
        for bucket in buckets:
            if not 0 < bucket.key.num_contexts <= bucket.key.total_tokens:
                raise ConfigError(f"a bucket needs 1 to total_tokens contexts, got {bucket.key}")
        self.buckets = tuple(sorted(set(buckets)))

    def fit(self, load: EncoderLoad) -> EncoderBucket | None:
        """The smallest bucket with room for all of `load`'s tokens, contexts, windows and rows; None if none has."""
        for bucket in self.buckets:
            need = (load.tokens, load.contexts, load.windows, load.rows)
            if all(n <= size for n, size in zip(need, (*bucket.key, bucket.window_rows, bucket.rows), strict=True)):
                return bucket
        return None


def build_ladder(
    budgets: EncoderBudgets,
    processor: Processor,
    cfg: ModelConfig,
    *,
    buckets: Sequence[tuple[int, int]] | None = None,
    floor: int = MIN_TOKENS,
) -> BucketLadder:
    """Buckets for every batch within the budgets.

    Contexts and window rows are sized for ordinary pictures. If the worst legal item needs more of them, one last
    bucket has room for it, and only such batches pay for it.

    Args:
      buckets: (total tokens, contexts) to compile instead of the derived sizes; the last bucket is added all the same.
      floor: tokens of the smallest derived bucket.
    """
    if buckets is not None and not buckets:
        raise ConfigError("encoder buckets must not be an empty list")

    def sized(tokens: int, contexts: int) -> EncoderBucket:
        windows = 0
        if cfg.window_capacity:
            ordinary = max(MIN_CONTEXTS, int(WINDOW_SLACK * tokens / cfg.window_capacity))
            windows = min(ordinary, processor.worst_windows(tokens))
        rows = max_output_rows(processor, cfg.merge, tokens)
        return EncoderBucket(EncoderGraphKey(tokens, contexts), windows, rows)

    sizes = sizes_that_reach(budgets.max_num_tokens, floor)
    pairs = buckets or [(size, min(size, max(MIN_CONTEXTS, size // TOKENS_PER_CONTEXT))) for size in sizes]
    ladder = [sized(tokens, contexts) for tokens, contexts in pairs]
    top = max(ladder)
    tokens = max(top.key.total_tokens, sizes[-1] if top.key.total_tokens < budgets.max_num_tokens else 0)
    worst = sized(tokens, max(top.key.num_contexts, budgets.attention_capacity["full"]))
    worst = worst._replace(
        window_rows=max(worst.window_rows, budgets.attention_capacity.get("window", 0)),
        rows=max(worst.rows, budgets.max_output_rows),
    )
    return BucketLadder([*ladder, worst])


class PaddingStats:
    """How much of the encoder's work went into padding."""

    def __init__(self) -> None:
        # Buckets of equal tokens and contexts, which differ in window rows, count as one.
        self._runs: Counter[EncoderGraphKey] = Counter()
        self._real: Counter[EncoderGraphKey] = Counter()

    def record(self, bucket: EncoderBucket, load: EncoderLoad) -> None:
        """Counts one run of `bucket` for `load`."""
        self._runs[bucket.key] += 1
        self._real[bucket.key] += load.tokens

    def snapshot(self) -> dict[str, Any]:
        """Runs, tokens with and without padding, the share that is padding; runs and share by bucket.

        Buckets are named by tokens and contexts, "512x8".
        """
        padded = {key: runs * key.total_tokens for key, runs in self._runs.items()}
        return {
            "runs": self._runs.total(),
            "tokens": self._real.total(),
            "padded_tokens": sum(padded.values()),
            "waste": _waste(self._real.total(), sum(padded.values())),
            "buckets": {
                "{}x{}".format(*key): {"runs": runs, "waste": _waste(self._real[key], padded[key])}
                for key, runs in sorted(self._runs.items())
            },
        }


def _waste(real: int, padded: int) -> float:
    return 1 - real / padded if padded else 0.0
