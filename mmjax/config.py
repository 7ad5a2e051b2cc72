# SPDX-License-Identifier: Apache-2.0
"""Every knob, validated, and the bucket ladders that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mmjax.bucket_sizes import sizes_up_to
from mmjax.encoder.budgets import parse_bytes
from mmjax.errors import ConfigError
from mmjax.inputs.items import Modality


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{type(config).__name__}.{name} must be positive, got {value}")


def _not_negative(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 0:
            raise ConfigError(f"{type(config).__name__}.{name} must not be negative, got {value}")


def _one_of(config: object, name: str, allowed: tuple) -> None:
    value = getattr(config, name)
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{type(config).__name__}.{name} must be one of {choices}, got {value!r}")


@dataclass(frozen=True)
class EngineConfig:
    """The first plane: tokens, sequences and KV pages. None means "choose for this model and device".

    Attributes:
      max_batch_size: sequences that run together; also the largest decode bucket.
      max_num_tokens: tokens of one step, so the largest prefill chunk; also the largest prefill bucket.
      max_seq_len: prompt plus answer of one request.
      max_prefill_sequences: sequences whose chunks one prefill step packs.
      chunk_tokens: a host limit on the tokens of a step below `max_num_tokens`; changing it compiles nothing.
      tokens_per_block: tokens of one KV page.
      num_blocks: KV pages. None on a GPU: what is left of its memory.
      block_limit: a host limit below `num_blocks`; changing it compiles nothing.
      kv_cache_free_gpu_memory_fraction: share of the memory left after weights, rows and temporaries that KV takes.
      enable_block_reuse: keep full pages of finished requests for prompts that begin alike.
      enable_chunked_prefill: split prompts longer than a step over several steps.
      disable_overlap_scheduler: read the tokens of a step before the next one is dispatched.
      mask_placeholders: never sample an id that stands for an image, clip or sound.
      trace_steps: rows of the step trace to keep (`LLM.trace`); 0 keeps none.
      compile_threads: threads that compile executables at start-up.
      compilation_cache: keep compiled executables on disk between runs, and load them; on a GPU without tracing.
    """

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_prefill_sequences: int | None = None
    chunk_tokens: int | None = None
    tokens_per_block: int = 64
    num_blocks: int | None = None
    block_limit: int | None = None
    kv_cache_free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True
    enable_chunked_prefill: bool = True
    disable_overlap_scheduler: bool = False
    mask_placeholders: bool = True
    trace_steps: int = 0
    compile_threads: int | None = None
    compilation_cache: bool = True

    def __post_init__(self):
        _positive(
            self, "max_batch_size", "max_num_tokens", "max_seq_len", "max_prefill_sequences", "chunk_tokens",
            "tokens_per_block", "num_blocks", "block_limit", "compile_threads",
        )  # fmt: skip
        _not_negative(self, "trace_steps")
        if not 0 < self.kv_cache_free_gpu_memory_fraction <= 1:
            raise ConfigError(
                "EngineConfig.kv_cache_free_gpu_memory_fraction must lie in (0, 1], "
                f"got {self.kv_cache_free_gpu_memory_fraction}"
            )


Policy = Literal["disabled", "default", "eager"]
Readiness = Literal["chunk", "request"]


@dataclass(frozen=True)
class MultimodalConfig:
    """The second plane: items, their budgets and their cache.

    Attributes:
      encoder_max_num_tokens: budget B, attention tokens (before merging) of one encoder batch; None: 2048 on a
        CPU, 8192 on a GPU. Raised to the largest picture; a clip that needs more is refused with both numbers.
      encoder_batch_size: budget A, items of one encoder batch; None: `max_batch_size`.
      encoder_output_max_bytes: budget C, bytes of rows that requests in progress may hold; None: those of one encoder
        batch. Raised to the largest picture.
      encoder_cache_max_bytes: budget D, bytes of rows kept for reuse; "128MiB" style strings are binary. 0: no reuse.
      encoder_buckets: (attention tokens, contexts) of the encoder's compiled sizes; None: a ladder that follows from A
        and B. One for the largest item is added all the same.
      encoder_scheduling_policy: "default", "eager" (items before LLM capacity) or "disabled" (whole requests at once).
      readiness: "chunk" starts prefill before a request's last item is encoded; "request" waits for all of them.
      encoder_tokens_while_decoding: cap on encoder tokens of a step while sequences decode; None: budget B.
      encoder_side_stream_max_ahead: requests whose items are encoded before a chunk needs them, in budget left over.
      limit_mm_per_prompt: most items of each modality in one prompt, such as {"image": 4}.
      max_image_pixels: pictures with more pixels are refused before they are decoded.
      image_background: colour behind transparent pixels.
      allowed_local_media: accept paths and file: URLs as media.
      allow_private_hosts: let media URLs resolve to private addresses.
      media_threads: threads that decode and resize.
      mm_encoder_only: no text model, no KV pool: only `LLM.encode` works.
      disable_mm_encoder: no vision tower: text only.
    """

    encoder_max_num_tokens: int | None = None
    encoder_batch_size: int | None = None
    encoder_output_max_bytes: int | str | None = None
    encoder_cache_max_bytes: int | str = "128MiB"
    encoder_buckets: Sequence[tuple[int, int]] | None = None
    encoder_scheduling_policy: Policy = "default"
    readiness: Readiness = "chunk"
    encoder_tokens_while_decoding: int | None = None
    encoder_side_stream_max_ahead: int = 0
    limit_mm_per_prompt: Mapping[str, int] | None = None
    max_image_pixels: int = 178_956_970
    image_background: tuple[int, int, int] = (255, 255, 255)
    allowed_local_media: bool = True
    allow_private_hosts: bool = False
    media_threads: int = 4
    mm_encoder_only: bool = False
    disable_mm_encoder: bool = False

    def __post_init__(self):
        _positive(
            self, "encoder_max_num_tokens", "encoder_batch_size", "encoder_tokens_while_decoding", "max_image_pixels",
            "media_threads",
        )  # fmt: skip
        _not_negative(self, "encoder_side_stream_max_ahead")
        parse_bytes(self.encoder_cache_max_bytes, "MultimodalConfig.encoder_cache_max_bytes")
        if self.encoder_output_max_bytes is not None:
            parse_bytes(self.encoder_output_max_bytes, "MultimodalConfig.encoder_output_max_bytes")
        buckets = self.encoder_buckets
        if buckets is not None and not (buckets and all(0 < contexts <= tokens for tokens, contexts in buckets)):
            raise ConfigError(
                "MultimodalConfig.encoder_buckets must be pairs of tokens and 1 to that many contexts, "
                f"got {list(buckets)}"
            )
        for name, limit in (self.limit_mm_per_prompt or {}).items():
            if name not in list(Modality) or limit < 0:
                raise ConfigError(
                    f"MultimodalConfig.limit_mm_per_prompt must map {', '.join(Modality)} to numbers of items, "
                    f"got {name!r}: {limit}"
                )
        _one_of(self, "encoder_scheduling_policy", ("disabled", "default", "eager"))
        _one_of(self, "readiness", ("chunk", "request"))
        if self.mm_encoder_only and self.disable_mm_encoder:
            raise ConfigError("MultimodalConfig.mm_encoder_only and disable_mm_encoder exclude each other")
        if len(self.image_background) != 3 or not all(0 <= c <= 255 for c in self.image_background):
            raise ConfigError(
                f"MultimodalConfig.image_background must be three values in 0..255, got {self.image_background}"
            )


# What None becomes for budget B.
ENCODER_TOKENS = {"cpu": 2048, "gpu": 8192}

# What None becomes: (max_batch_size, max_num_tokens, max_seq_len, max_prefill_sequences). A CPU compiles slowly and
# serves one person; a GPU serves many.
_DEFAULTS = {"cpu": (8, 512, 4096, 4), "gpu": (256, 8192, 32768, 32)}


# Sequences of a GPU's smallest decode step: a step of 16 took 4.9 ms where one of 1 took 5.8 (7B sizes on an H200).
GPU_DECODE_FLOOR = 16

# Largest prefill step that a GPU has without a look for prefixes too.
PREFIXLESS_TOKENS = 2048

# Prompt tokens that a small prefill step has for each sequence it may pack.
TOKENS_PER_SEQUENCE = 32


def resolve_engine(config: EngineConfig, platform: str, max_position_embeddings: int) -> EngineConfig:
    """Fills every None of `config` but `num_blocks`, for `platform` ("cpu" or "gpu") and the model's position limit."""
    batch, tokens, length, prefills = _DEFAULTS["cpu" if platform == "cpu" else "gpu"]
    max_batch_size = config.max_batch_size or batch
    if config.max_seq_len is not None and config.max_seq_len > max_position_embeddings:
        raise ConfigError(
            f"EngineConfig.max_seq_len is {config.max_seq_len}, but the model knows {max_position_embeddings} positions"
        )
    max_num_tokens = config.max_num_tokens or max(tokens, max_batch_size)
    if max_num_tokens < max_batch_size:
        raise ConfigError(
            f"EngineConfig.max_num_tokens ({max_num_tokens}) must be at least max_batch_size ({max_batch_size}): "
            "every running sequence decodes one token a step"
        )
    return replace(
        config,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=config.max_seq_len or min(length, max_position_embeddings),
        max_prefill_sequences=min(config.max_prefill_sequences or prefills, max_batch_size),
        chunk_tokens=min(config.chunk_tokens or max_num_tokens, max_num_tokens),
    )


class PrefillBucket(NamedTuple):
    """Sizes of a compiled prefill step: tokens, and sequences whose chunks it packs."""

    tokens: int
    sequences: int


def prefill_ladder(config: EngineConfig, platform: str) -> dict[bool, tuple[PrefillBucket, ...]]:
    """The prefill steps compiled for `platform` ("cpu" or "gpu"), by whether any of their sequences has a prefix.

    Where our own kernel does not run, a GPU makes the host wait in every layer to learn how long prefixes are: small
    steps, where it shows, are there without that too. Small steps also pack few sequences: each costs time, chunk or no
    chunk.
    """
    most = config.max_prefill_sequences
    *smaller, top = sizes_up_to(config.max_num_tokens, min(64, config.max_num_tokens))
    smaller = [PrefillBucket(size, min(most, max(1, size // TOKENS_PER_SEQUENCE))) for size in smaller]
    buckets = (*smaller, PrefillBucket(top, most))
    if platform == "cpu":
        return {True: buckets}
    return {True: buckets, False: tuple(bucket for bucket in buckets if bucket.tokens <= PREFIXLESS_TOKENS)}


def decode_ladder(config: EngineConfig, platform: str) -> tuple[int, ...]:
    """Sequence counts of the decode steps compiled for `platform`."""
    floor = 1 if platform == "cpu" else min(GPU_DECODE_FLOOR, config.max_batch_size)
    return sizes_up_to(config.max_batch_size, floor)


def smallest_fit(sizes: Sequence[int], needed: int) -> int:
    """The smallest of ascending `sizes` that holds `needed`."""
    for size in sizes:
        if size >= needed:
            return size
    raise ConfigError(f"no bucket of {sizes} holds {needed}")
