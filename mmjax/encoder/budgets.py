# SPDX-License-Identifier: Apache-2.0
"""The encoder plane's four budgets, resolved once at start-up: A items, B tokens, C resident bytes, D reuse bytes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum, auto
from typing import Any

from mmjax.errors import ConfigError
from mmjax.models.family import ModelConfig, Processor

logger = logging.getLogger(__name__)

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_UNITS = {"": 1, "b": 1} | {p + suffix: 1024**k for k, p in enumerate("kmgt", 1) for suffix in ("b", "ib")}


class Readiness(StrEnum):
    """When a request may prefill: chunk by chunk as its rows arrive, or once all of its items are encoded."""

    CHUNK = auto()
    REQUEST = auto()


@dataclass(frozen=True)
class EncoderBudgets:
    """What one encoder step may cost and what the row pool holds.

    Attributes:
      batch_size: A, items of one encoder batch.
      base_num_tokens: B as configured, in attention tokens before merging.
      max_num_tokens: B in force, raised to the largest item.
      largest_item: attention tokens of the largest item of any modality; `item_tokens` has them by modality.
      attention_capacity: segments that one item of B tokens may need, by kind of attention ("full" contexts, "window"
        rows); a clip may be larger than `largest_item`.
      max_output_rows: rows that one legal encoder batch may give.
      row_bytes: bytes of one embedding row.
      output_bytes: C, bytes of rows that requests in progress may hold.
      reuse_bytes: D, bytes of rows to keep for reuse; 0 keeps nothing after its last user.
      capacity_rows: whole rows of the pool, for max(C, D).
    """

    readiness: Readiness
    batch_size: int
    base_num_tokens: int
    max_num_tokens: int
    largest_item: int
    item_tokens: Mapping[str, int]
    attention_capacity: Mapping[str, int]
    max_output_rows: int
    row_bytes: int
    output_bytes: int
    reuse_bytes: int
    capacity_rows: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `stats()`."""
        return asdict(self) | {"readiness": str(self.readiness)}


def parse_bytes(value: int | str, knob: str = "size") -> int:
    """Bytes of 134217728 or "128MiB": a non-negative integer and, in a string, B, KB, MB, GB, TB or KiB to TiB.

    All units are binary and case does not matter. Raises ConfigError, which names `knob`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", value.lower()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{knob} must be a non-negative number of bytes such as 134217728 or '128MiB', got {value!r}")
    return int(match[1]) * _UNITS[match[2]]


def bytes_per_row(cfg: ModelConfig, row_dtype: str | None = None, text_embedding: Any = None) -> int:
    """Bytes of one embedding row.

    Four sources, the first that is there: the family's row width in the pool's dtype, the row width in the model's
    dtype, the text embedding table (anything with `shape` and `dtype`), the text width of the config in its dtype.
    """
    dtype = getattr(cfg, "dtype", None)
    row_width = getattr(cfg, "row_width", None)
    if row_width and (row_dtype or dtype):
        return row_width * _itemsize(row_dtype or dtype)
    if text_embedding is not None:
        return int(text_embedding.shape[-1]) * int(text_embedding.dtype.itemsize)
    hidden = getattr(cfg, "hidden_size", None) or getattr(getattr(cfg, "text_config", None), "hidden_size", None)
    if hidden and dtype:
        return hidden * _itemsize(dtype)
    raise ConfigError("the width and dtype of an embedding row follow neither from the config nor from the weights")


def max_output_rows(processor: Processor, merge: int, tokens: int) -> int:
    """Rows that items of `tokens` attention tokens in all may give at most.

    A family whose encoder adds rows of its own (line breaks, start and end) says how many through a method `max_rows`.
    """
    max_rows = getattr(processor, "max_rows", None)
    return max_rows(tokens) if max_rows else tokens // merge


def worst_contexts(processor: Processor, merge: int, tokens: int) -> int:
    """Attention contexts that one item of `tokens` tokens may have at most.

    Without more knowledge a frame may be as small as one embedding row; a family that bounds the number of frames
    says so through a method `worst_contexts`.
    """
    bound = getattr(processor, "worst_contexts", None)
    return bound(tokens) if bound else max(1, tokens // merge)


def resolve_budgets(
    processor: Processor,
    cfg: ModelConfig,
    *,
    max_batch_size: int | None,
    max_num_tokens: int | None,
    readiness: Readiness | str = Readiness.CHUNK,
    encoder_batch_size: int | None = None,
    encoder_max_num_tokens: int | None = None,
    encoder_cache_max_bytes: int | str = "128MiB",
    encoder_output_max_bytes: int | str | None = None,
    row_dtype: str | None = None,
    text_embedding: Any = None,
) -> EncoderBudgets:
    """All budgets, in the order in which they depend on each other; logs them in one line.

    Args:
      max_batch_size, max_num_tokens: the language model's limits, which stand in for A and B where those are None.
      encoder_cache_max_bytes: D; 0 switches reuse off.
      encoder_output_max_bytes: C; None for the rows of one full batch. Never below the largest item, nor, when requests
        wait for all of their items, below the rows of one full batch.
      row_dtype, text_embedding: see `bytes_per_row`.

    Raises:
      ConfigError: a budget is missing or not positive.
    """
    readiness = Readiness(readiness)
    batch_size = _positive("encoder_batch_size", max_batch_size if encoder_batch_size is None else encoder_batch_size)
    base = _positive(
        "encoder_max_num_tokens", max_num_tokens if encoder_max_num_tokens is None else encoder_max_num_tokens
    )
    item_tokens = _item_tokens(processor)
    largest = max(item_tokens.values())
    tokens = max(base, largest)
    if tokens > base:
        logger.warning("encoder_max_num_tokens raised from %d to %d, the tokens of the largest item", base, tokens)
    capacity = {"full": _positive("the contexts of the worst item", worst_contexts(processor, cfg.merge, tokens))}
    if cfg.window_capacity:
        capacity["window"] = _positive("the window rows of the worst item", processor.worst_windows(tokens))
    rows = _positive("the output rows of an encoder batch", max_output_rows(processor, cfg.merge, tokens))
    row_bytes = bytes_per_row(cfg, row_dtype, text_embedding)
    least = rows if readiness is Readiness.REQUEST else max_output_rows(processor, cfg.merge, largest)
    output_bytes = _output_bytes(encoder_output_max_bytes, rows * row_bytes, least * row_bytes)
    reuse_bytes = parse_bytes(encoder_cache_max_bytes, "encoder_cache_max_bytes")
    budgets = EncoderBudgets(
        readiness=readiness,
        batch_size=batch_size,
        base_num_tokens=base,
        max_num_tokens=tokens,
        largest_item=largest,
        item_tokens=item_tokens,
        attention_capacity=capacity,
        max_output_rows=rows,
        row_bytes=row_bytes,
        output_bytes=output_bytes,
        reuse_bytes=reuse_bytes,
        capacity_rows=max(output_bytes, reuse_bytes) // row_bytes,
    )
    logger.info("encoder budgets: %s", ", ".join(f"{name}={value}" for name, value in budgets.as_dict().items()))
    return budgets


def _output_bytes(wanted: int | str | None, default: int, least: int) -> int:
    if wanted is None:
        return default
    asked = parse_bytes(wanted, "encoder_output_max_bytes")
    if asked < least:
        logger.warning("encoder_output_max_bytes raised from %d to %d, the least that can make progress", asked, least)
    return max(asked, least)


def _item_tokens(processor: Processor) -> dict[str, int]:
    """Attention tokens of the largest item of each modality."""
    item_tokens = {str(modality): tokens for modality, tokens in processor.max_tokens_per_item().items()}
    if not item_tokens:
        raise ConfigError("the processor names no largest item for any modality, so the encoder's budget has no base")
    for modality, tokens in item_tokens.items():
        _positive(f"the largest {modality}", tokens)
    return item_tokens


def _positive(name: str, value: int | None) -> int:
    if value is None or value <= 0:
        raise ConfigError(f"{name} must be positive, got {value}")
    return value


def _itemsize(dtype: str) -> int:
    if dtype not in _ITEMSIZE:
        raise ConfigError(f"embedding rows must be one of {sorted(_ITEMSIZE)}, got {dtype!r}")
    return _ITEMSIZE[dtype]
