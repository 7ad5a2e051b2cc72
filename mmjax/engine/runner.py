# SPDX-License-Identifier: Apache-2.0
"""The first plane's device side: owns KV pages and sampler state, and one executable a prefill, decode or sample size.

A forward step leaves logits on the device, and a sampling step takes them from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.dispatch import PagedDecode, PagedPrefill, choices, decode_attention, prefill_attention
from mmjax.compilation import Job, device_errors, shapes_on
from mmjax.config import EngineConfig, PrefillBucket, decode_ladder, prefill_ladder, smallest_fit
from mmjax.engine.batch import Chunk, Layout, RowSlots, decode_arrays, prefill_arrays
from mmjax.engine.request import Request
from mmjax.errors import EngineError
from mmjax.layers.sampling import SamplingInputs, init_state
from mmjax.models.family import Family, ModelConfig
from mmjax.models.steps import (
    DecodeInputs,
    EngineState,
    PrefillInputs,
    SlotState,
    decode_step,
    prefill_step,
    remember_tokens,
    sample_step,
)
from mmjax.sampling_params import SamplingRow, banned_mask, is_plain_greedy, sampling_arrays

# Rows of the largest decode step for which XLA may run matrix products through Triton: at 7B sizes on an H200 a step of
# 16 took 4.7 ms with and 5.0 without, one of 64 5.8 with and 5.6 without.
TRITON_ROWS = 16


@dataclass(frozen=True)
class StepResult:
    """Tokens of a step that may still be running; `read()` waits for them."""

    requests: tuple[Request, ...]  # row i belongs to requests[i]; only rows that sampled are listed
    rows: tuple[int, ...]
    sampled: Any

    def read(self) -> Any:
        """The step's `Sampled` as numpy arrays."""
        with device_errors():
            return jax.tree.map(np.asarray, self.sampled)


class ModelRunner:
    """Compiles and runs the text model's steps.

    `pool` gives the embedding pool of the moment; it is read by prefill steps and never kept.
    """

    def __init__(
        self,
        family: Family,
        cfg: ModelConfig,
        params: dict,
        config: EngineConfig,
        *,
        device: jax.Device,
        pool: Callable[[], jax.Array],
        pool_rows: int,
        banned_ids: Sequence[int],
    ):
        self.family, self.cfg, self.params, self.config, self.device = family, cfg, params, config, device
        self._pool = pool
        self._pool_rows = pool_rows
        self._banned = jax.device_put(banned_mask(banned_ids, cfg.vocab_size), device)
        self._prefill_buckets = prefill_ladder(config, device.platform)
        if not self._waits_for_prefixes():
            self._prefill_buckets.pop(False, None)
        self._decode_sizes = decode_ladder(config, device.platform)
        self._prefill: dict[tuple[PrefillBucket, bool], Any] = {}
        self._decode: dict[int, Any] = {}
        self._sample: dict[tuple[int, bool], Any] = {}
        self._remember: Any = None
        self.state: EngineState | None = None
        self.layout: Layout | None = None
        self._make_state: Callable[[], EngineState] | None = None

    def _waits_for_prefixes(self) -> bool:
        """Whether a step without prefixes is quicker: not with our kernel, nor where layers attend by themselves."""
        cfg, page = self.cfg, self.config.tokens_per_block
        if not self.family.keeps_keys_and_values(cfg):
            return False
        return choices(self.device.platform, cfg.dtype, cfg.head_dim, page=page).prefill != "mosaic"

    # ---- start-up -------------------------------------------------------------------------------------------------

    def set_num_blocks(self, num_blocks: int) -> None:
        """Fixes the size of the KV pool; executables and arrays made later follow it."""
        page = self.config.tokens_per_block
        self.layout = Layout(
            page=page,
            num_blocks=num_blocks,
            table_width=-(-self.config.max_seq_len // page),
            num_slots=self.config.max_batch_size,
            pool_rows=self._pool_rows,
            axes=self.cfg.position_axes,
        )
        self._make_state = None

    def bytes_per_block(self) -> int:
        """Bytes of one KV page over all layers."""
        values = sum(math.prod(shape) for shape in self.family.state_shapes(self.cfg))
        return values * self.config.tokens_per_block * jnp.dtype(self.cfg.dtype).itemsize

    def bytes_beside_pages(self) -> int:
        """Bytes of the state's other arrays: what the sampler remembers of each slot."""
        state = jax.eval_shape(self._fresh_state)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.replace(kv=())))

    def allocate(self) -> None:
        """Makes the state's arrays; after a device error, makes them again."""
        self.state = None  # the old ones go first: two sets may not fit
        if self._make_state is None:
            sharding = jax.sharding.SingleDeviceSharding(self.device)
            self._make_state = jax.jit(self._fresh_state, out_shardings=sharding).lower().compile()
        self.state = self._make_state()

    def _fresh_state(self) -> EngineState:
        cfg, layout = self.cfg, self.layout
        return EngineState(
            kv=tuple(
                jnp.zeros((layout.num_blocks, parts, heads, layout.page, width), cfg.dtype)
                for parts, heads, width in self.family.state_shapes(cfg)
            ),
            slots=SlotState(
                sampler=init_state(layout.num_slots, cfg.vocab_size),
                last_token=jnp.zeros(layout.num_slots, jnp.int32),
            ),
        )

    def jobs(self, *, largest_only: bool = False) -> list[Job]:
        """Compile jobs of every size, largest first; forward steps refer to the pool size set last.

        Steps that know nothing of pages are left out once they are compiled.

        Args:
          largest_only: the largest step of each kind alone, which tell how much memory steps need.
        """
        state = shapes_on(self.device, jax.eval_shape(self._fresh_state))
        kinds = [self._prefill_jobs(state.kv), self._decode_jobs(state), self._sample_jobs(state.slots)]
        if largest_only:
            return [jobs[0] for jobs in kinds]
        return [*(job for jobs in kinds for job in jobs), self._remember_job(state.slots)]

    def _prefill_jobs(self, kv: Sequence[jax.ShapeDtypeStruct]) -> list[Job]:
        attend = prefill_attention(self.device.platform)
        step = partial(prefill_step, self.family, self.cfg, attend)
        pool = jax.ShapeDtypeStruct((self._pool_rows, self.cfg.row_width), self.cfg.dtype)
        params, pool = shapes_on(self.device, (self.params, pool))
        jobs = []
        for any_prefix, buckets in self._prefill_buckets.items():
            for bucket in reversed(buckets):
                inputs, _ = self._prefill_inputs([], bucket, None, any_prefix)
                keep = partial(self._prefill.__setitem__, (bucket, any_prefix))
                arguments = (params, pool, kv, shapes_on(self.device, inputs))
                jobs.append(Job(_prefill_name(bucket, any_prefix), step, arguments, keep, (2,)))
        return jobs

    def _decode_jobs(self, state: EngineState) -> list[Job]:
        attend = decode_attention(self.device.platform)
        step = partial(decode_step, self.family, self.cfg, attend)
        params, jobs = shapes_on(self.device, self.params), []
        for size in reversed(self._decode_sizes):
            inputs = shapes_on(self.device, self._decode_inputs([], size))
            arguments = (params, state.kv, state.slots.last_token, inputs)
            keep, options = partial(self._decode.__setitem__, size), {"xla_gpu_enable_triton_gemm": size <= TRITON_ROWS}
            jobs.append(Job(f"decode {size}", step, arguments, keep, (1,), options))
        return jobs

    def _sample_jobs(self, slots: SlotState) -> list[Job]:
        """For every number of rows that a forward step leaves: any parameters, and none but plainly greedy ones."""
        rows_of_prefill = {bucket.sequences for buckets in self._prefill_buckets.values() for bucket in buckets}
        jobs = []
        for rows in sorted({*rows_of_prefill, *self._decode_sizes}, reverse=True):
            logits = jax.ShapeDtypeStruct((rows, self.cfg.vocab_size), jnp.float32)
            for greedy in (False, True):
                if (rows, greedy) in self._sample:
                    continue
                inputs = (logits, np.zeros(rows, np.int32), None if greedy else self._sampling([], rows))
                arguments = (*shapes_on(self.device, (self._banned,)), slots, *shapes_on(self.device, inputs))
                keep = partial(self._sample.__setitem__, (rows, greedy))
                jobs.append(Job(_sample_name(rows, greedy), sample_step, arguments, keep, (1,)))
        return jobs

    def _remember_job(self, slots: SlotState) -> Job:
        shapes = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (self.config.max_seq_len,)))
        scalar, tokens = shapes_on(self.device, tuple(shapes))
        return Job("remember", remember_tokens, (slots, scalar, tokens, scalar, scalar), self._keep_remember, (0,))

    def _keep_remember(self, compiled: Any) -> None:
        self._remember = compiled

    def release(self) -> None:
        """Lets go of arrays and executables."""
        self.params = self.state = self._banned = self._remember = None
        self._prefill.clear()
        self._decode.clear()
        self._sample.clear()

    def executables(self) -> dict[str, Any]:
        """Every compiled step by name, for memory accounting and tests."""
        named = {_prefill_name(*key): compiled for key, compiled in self._prefill.items()}
        named |= {f"decode {size}": compiled for size, compiled in self._decode.items()}
        named |= {_sample_name(*key): compiled for key, compiled in self._sample.items()}
        return named if self._remember is None else named | {"remember": self._remember}

    # ---- steps ----------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Readies the request's slot before its first chunk; only penalties need it."""
        if not request.params.penalised:
            return
        ids = np.zeros(self.config.max_seq_len, np.int32)
        known = request.token_ids(0, request.prefill_end)
        ids[: len(known)] = known
        counts = np.int32(request.prompt_len), np.int32(request.prefill_end - request.prompt_len)
        with device_errors():
            slots = self._remember(self.state.slots, np.int32(request.slot), ids, *counts)
        self.state = self.state.replace(slots=slots)

    def prefill(self, chunks: Sequence[Chunk], row_slots: RowSlots) -> StepResult:
        """Dispatches one packed step of prompt chunks; chunks that complete a prompt sample a token."""
        bucket, any_prefix = self._prefill_step(chunks)
        inputs, slots = self._prefill_inputs(chunks, bucket, row_slots, any_prefix)
        with device_errors():
            kv, logits = self._prefill[bucket, any_prefix](self.params, self._pool(), self.state.kv, inputs)
        self.state = self.state.replace(kv=kv)
        done = [(row, chunk.request) for row, chunk in enumerate(chunks) if chunk.completes]
        return self._draw(logits, slots, [chunk.request for chunk in chunks], done)

    def decode(self, requests: Sequence[Request]) -> StepResult:
        """Dispatches one token of every request."""
        size = smallest_fit(self._decode_sizes, len(requests))
        inputs, state = self._decode_inputs(requests, size), self.state
        with device_errors():
            kv, logits = self._decode[size](self.params, state.kv, state.slots.last_token, inputs)
        self.state = state.replace(kv=kv)
        return self._draw(logits, inputs.slots, requests, list(enumerate(requests)))

    def _draw(
        self,
        logits: jax.Array,
        slots: np.ndarray,
        requests: Sequence[Request],
        wanted: Sequence[tuple[int, Request]],
    ) -> StepResult:
        """Samples a token of each row of `logits`, which are of `requests`; the rows listed in `wanted` are read."""
        rows = [request.sampling_row for request in requests]
        greedy = is_plain_greedy(rows)
        inputs = None if greedy else self._sampling(rows, len(slots))
        with device_errors():
            slot_state, sampled = self._sample[len(slots), greedy](
                self._banned, self.state.slots, logits, slots, inputs
            )
        self.state = self.state.replace(slots=slot_state)
        for leaf in jax.tree.leaves(sampled):
            leaf.copy_to_host_async()
        return StepResult(tuple(r for _, r in wanted), tuple(row for row, _ in wanted), sampled)

    def _prefill_step(self, chunks: Sequence[Chunk]) -> tuple[PrefillBucket, bool]:
        """The smallest step that holds the chunks, and whether it looks for prefixes."""
        tokens = sum(map(len, chunks))
        for any_prefix in (False, True):
            if any_prefix or not any(chunk.begin for chunk in chunks):
                for bucket in self._prefill_buckets.get(any_prefix, ()):
                    if bucket.tokens >= tokens and bucket.sequences >= len(chunks):
                        return bucket, any_prefix
        raise EngineError(f"no prefill step holds {tokens} tokens of {len(chunks)} sequences")

    def _prefill_inputs(
        self, chunks: Sequence[Chunk], bucket: PrefillBucket, row_slots: RowSlots | None, any_prefix: bool
    ) -> tuple[PrefillInputs, np.ndarray]:
        """And the slots that take what is sampled: the number of slots where a prompt goes on, and for padding."""
        arrays = prefill_arrays(chunks, *bucket, self.layout, row_slots)
        pages = PagedPrefill(
            cu_seqlens=arrays["cu_seqlens"],
            prefix_lens=arrays["prefix_lens"],
            block_tables=arrays["block_tables"],
            slots=arrays["kv_slots"],
            any_prefix=any_prefix,
        )
        inputs = PrefillInputs(
            token_ids=arrays["token_ids"],
            row_index=arrays["row_index"],
            positions=arrays["positions"],
            pages=pages,
            last=arrays["last"],
        )
        return inputs, arrays["slots"]

    def _decode_inputs(self, requests: Sequence[Request], size: int) -> DecodeInputs:
        arrays = decode_arrays(requests, size, self.layout)
        pages = PagedDecode(seq_lens=arrays["seq_lens"], block_tables=arrays["block_tables"], slots=arrays["kv_slots"])
        return DecodeInputs(positions=arrays["positions"], pages=pages, slots=arrays["slots"])

    def _sampling(self, rows: Sequence[SamplingRow], size: int) -> SamplingInputs:
        return SamplingInputs(**sampling_arrays(rows, size, self.cfg.vocab_size))


def _prefill_name(bucket: PrefillBucket, any_prefix: bool) -> str:
    return f"prefill {bucket.tokens}{'' if any_prefix else ' without prefix'}"


def _sample_name(rows: int, greedy: bool) -> str:
    return f"sample {rows}{' greedy' if greedy else ''}"
