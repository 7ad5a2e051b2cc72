# SPDX-License-Identifier: Apache-2.0
"""From a model to a running engine: budgets, buckets, KV pages sized from what the compiler reports, executables."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.compilation import CompileCounter, Job, bytes_needed, compile_all, use_persistent_cache
from mmjax.config import ENCODER_TOKENS, EngineConfig, MultimodalConfig, resolve_engine
from mmjax.encoder.buckets import build_ladder
from mmjax.encoder.budgets import EncoderBudgets, resolve_budgets
from mmjax.encoder.runner import EncoderRunner
from mmjax.engine.runner import ModelRunner
from mmjax.engine.service import Service
from mmjax.engine.trace import StepTrace
from mmjax.errors import ConfigError
from mmjax.executable_cache import NOTHING_KEPT, ExecutableCache
from mmjax.models.family import Model
from mmjax.reference.engine import ReferenceEngine

logger = logging.getLogger(__name__)

SLACK = 0.03  # of the device's memory, for what neither the compiler nor we account for
BLOCK_GRID = 64  # `num_blocks` is part of every signature: a coarse grid keeps the compilation cache useful
NOMINAL_BLOCKS = 8
CPU_KV_BYTES = 1 << 30


@dataclass(frozen=True)
class Machine:
    """The two runners, ready to serve, and what they were sized by."""

    config: EngineConfig
    budgets: EncoderBudgets
    encoder: EncoderRunner
    text: ModelRunner | None  # None with mm_encoder_only
    compile_seconds: float
    counter: CompileCounter  # compilations since everything was ready

    def replace_weights(self, params: dict) -> None:
        """Puts other weights of the same shapes and dtypes in; nothing compiles. Raises ConfigError if they differ."""
        runners = {"vision": self.encoder, "text": self.text}
        runners = {part: runner for part, runner in runners.items() if runner is not None and runner.params is not None}
        for part, runner in runners.items():
            _check_same(part, runner.params, params.get(part, {}))
        for part, runner in runners.items():
            runner.params = jax.device_put(params[part], runner.device)

    def release(self) -> None:
        """Lets go of arrays and executables; nothing can be served any more."""
        self.counter.stop()
        self.encoder.release()
        if self.text is not None:
            self.text.release()


def start_engine(
    model: Model,
    params: dict,
    engine: EngineConfig,
    multimodal: MultimodalConfig,
    *,
    media: Executor,
    device: jax.Device,
    reference: bool,
    progress: bool,
) -> Service | ReferenceEngine:
    """A running engine: the fast one, or the slow judge."""
    if reference:
        banned = model.processor.never_sampled if engine.mask_placeholders else ()
        return ReferenceEngine(model, params, device=device, max_seq_len=engine.max_seq_len, banned_ids=banned).start()
    machine = build_machine(model, params, engine, multimodal, device=device, progress=progress)
    return serve(machine, multimodal, media)


def serve(
    machine: Machine,
    multimodal: MultimodalConfig,
    media: Executor,
    *,
    config: EngineConfig | None = None,
    budgets: EncoderBudgets | None = None,
    trace: StepTrace | None = None,
) -> Service:
    """An engine over a machine; `config` and `budgets` may set other host limits within its shapes."""
    return Service(
        machine.text,
        machine.encoder,
        config or machine.config,
        multimodal,
        budgets or machine.budgets,
        machine.text.layout.num_blocks if machine.text else 1,
        media,
        machine=machine,
        trace=trace or StepTrace((config or machine.config).trace_steps),
    ).start()


def build_machine(
    model: Model,
    params: dict,
    engine: EngineConfig,
    multimodal: MultimodalConfig,
    *,
    device: jax.Device,
    progress: bool,
) -> Machine:
    """Sizes, compiles and allocates everything that serving needs."""
    kept = NOTHING_KEPT
    if engine.compilation_cache:
        use_persistent_cache()
        kept = ExecutableCache.beside_jax(device)
    cfg = model.cfg
    config = resolve_engine(engine, device.platform, cfg.max_position_embeddings)
    budgets, encoder = _encoder(model, params, config, multimodal, device)
    start = time.perf_counter()
    compile_jobs = partial(
        _compile, dtype=cfg.dtype, device=device, kept=kept, threads=config.compile_threads, progress=progress
    )
    text = None
    if not multimodal.mm_encoder_only:
        banned = model.processor.never_sampled if config.mask_placeholders else ()
        text = ModelRunner(
            model.family,
            cfg,
            params["text"],
            config,
            device=device,
            pool=lambda: encoder.pool,
            pool_rows=budgets.capacity_rows,
            banned_ids=banned,
        )
        text.set_num_blocks(_num_blocks(text, encoder, params, config, device, compile_jobs))
    jobs = [*(text.jobs() if text else ()), *encoder.jobs()]
    compile_jobs(jobs)
    encoder.allocate()
    if text is not None:
        text.allocate()
    seconds = time.perf_counter() - start
    logger.info("compiled the last %d steps; ready after %.1f s", len(jobs), seconds)
    return Machine(config, budgets, encoder, text, seconds, CompileCounter().start())


def _encoder(
    model: Model, params: dict, config: EngineConfig, multimodal: MultimodalConfig, device: jax.Device
) -> tuple[EncoderBudgets, EncoderRunner]:
    budgets = resolve_budgets(
        model.processor,
        model.cfg,
        max_batch_size=config.max_batch_size,
        max_num_tokens=ENCODER_TOKENS["cpu" if device.platform == "cpu" else "gpu"],
        readiness=multimodal.readiness,
        encoder_batch_size=multimodal.encoder_batch_size,
        encoder_max_num_tokens=multimodal.encoder_max_num_tokens,
        encoder_cache_max_bytes=multimodal.encoder_cache_max_bytes,
        encoder_output_max_bytes=multimodal.encoder_output_max_bytes,
        text_embedding=params["text"]["embed"] if "text" in params else None,
    )
    ladder = build_ladder(budgets, model.processor, model.cfg, buckets=multimodal.encoder_buckets)
    encoder = EncoderRunner(
        model.family,
        model.cfg,
        None if multimodal.disable_mm_encoder else params["vision"] or None,  # a model may come without a tower
        model.processor,
        ladder.buckets,
        budgets.capacity_rows,
        device=device,
    )
    return budgets, encoder


def _check_same(part: str, old: dict, new: dict) -> None:
    """Raises ConfigError, naming a leaf, unless two trees have the same leaves by name, shape and dtype."""

    def leaves(tree: dict) -> dict[str, str]:
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): f"{leaf.dtype} {list(leaf.shape)}" for path, leaf in flat}

    known, given = leaves(old), leaves(new)
    for name in known | given:
        if known.get(name) != given.get(name):
            raise ConfigError(
                f"weights {part}{name}: expected {known.get(name, 'none')}, got {given.get(name, 'none')}"
            )


def _compile(jobs: list[Job], *, dtype: str, **options: Any) -> None:
    """float32 means float32: accelerators would round the operands of its matrix products to fewer bits."""
    with jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext():
        compile_all(jobs, **options)


def _num_blocks(
    text: ModelRunner,
    encoder: EncoderRunner,
    params: dict,
    config: EngineConfig,
    device: jax.Device,
    compile_jobs: Callable[[list[Job]], None],
) -> int:
    """KV pages: as configured, else what the device has left, else (on a CPU) enough for a full batch within 1 GiB."""
    per_sequence = -(-config.max_seq_len // config.tokens_per_block)
    if config.num_blocks is not None:
        blocks = config.num_blocks
    elif device.platform == "cpu":
        text.set_num_blocks(NOMINAL_BLOCKS)
        wanted = config.max_batch_size * per_sequence
        blocks = max(per_sequence, min(wanted, CPU_KV_BYTES // text.bytes_per_block()))
    else:
        blocks = _blocks_left(text, encoder, params, config, device, compile_jobs)
    if blocks < per_sequence:
        raise ConfigError(
            f"{blocks} KV pages of {config.tokens_per_block} tokens hold {blocks * config.tokens_per_block} tokens, "
            f"max_seq_len is {config.max_seq_len}; lower max_seq_len or raise num_blocks"
        )
    return blocks


def _blocks_left(
    text: ModelRunner,
    encoder: EncoderRunner,
    params: dict,
    config: EngineConfig,
    device: jax.Device,
    compile_jobs: Callable[[list[Job]], None],
) -> int:
    """Pages that fit beside weights, rows, slots and the largest temporaries, none of which depends on their number.

    The encoder's steps know nothing of pages: they are compiled beside this trial, once and for all.
    """
    limit = device.memory_stats()["bytes_limit"]
    text.set_num_blocks(NOMINAL_BLOCKS)
    compile_jobs([*text.jobs(largest_only=True), *encoder.jobs()])
    steps = {**text.executables(), **encoder.executables()}
    temp = max(map(bytes_needed, steps.values()))
    fixed = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    rows = encoder.pool_rows * encoder.cfg.row_width * jnp.dtype(encoder.cfg.dtype).itemsize
    slots = text.bytes_beside_pages()
    left = limit * (1 - SLACK) - fixed - rows - slots - temp
    blocks = int(left * config.kv_cache_free_gpu_memory_fraction) // text.bytes_per_block()
    wanted = config.max_batch_size * -(-config.max_seq_len // config.tokens_per_block)
    blocks = min(blocks // BLOCK_GRID, -(-wanted // BLOCK_GRID)) * BLOCK_GRID
    logger.info(
        "memory: limit %.1f GiB, weights %.1f, rows %.2f, slots %.2f, temporaries %.2f, %d KV pages",
        limit / 2**30, fixed / 2**30, rows / 2**30, slots / 2**30, temp / 2**30, blocks,
    )  # fmt: skip
    return blocks
