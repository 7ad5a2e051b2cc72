# SPDX-License-Identifier: Apache-2.0
"""The whole engine over a device of numpy, in which every position of the KV pool can be read.

A row of item `content` is `row_value(content, i)`, a text token is its id. The token that is "sampled" is a checksum of
all values and rotary positions that a sequence finds through its page table, so one row, page or position out of place
changes every token behind it. `expected` computes the same from the prompt alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from encoder_kit import make_budgets
from inputs_kit import ToyProcessor, plan_of

from mmjax.config import EngineConfig, MultimodalConfig
from mmjax.engine.batch import Layout, decode_arrays, prefill_arrays
from mmjax.engine.detokenizer import Detokenizer
from mmjax.engine.handle import Handle
from mmjax.engine.request import Request
from mmjax.engine.service import Service
from mmjax.engine.stop import StopChecker
from mmjax.engine.trace import StepTrace
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey
from mmjax.inputs.prepare import prepare_prompt
from mmjax.inputs.prompt import ItemInput, PreparedPrompt
from mmjax.models.qwen_shared.positions import mrope_positions
from mmjax.outputs import RequestOutput
from mmjax.sampling_params import SamplingParams

VOCAB = 100  # sampled ids include placeholders: wherever they come from, they are text
NOTHING = -7  # of rows and KV slots that were never written
AXES = (1, 1009, 1009**2)  # positions on three axes as one number


def row_value(content: int, index: int) -> int:
    return 10_000 + 1_000 * content + index


@dataclass(frozen=True)
class GridProcessor(ToyProcessor):
    """Toy spans with the rotary positions of the Qwen families."""

    axes: int = 3

    def positions(self, token_ids, spans) -> tuple[np.ndarray, int]:
        return mrope_positions(len(token_ids), spans, 2, None)


GRID, PLAIN = GridProcessor(), ToyProcessor(axes=3)


def item(content: int, rows: int = 6, *, plan: Any = None, columns: int | None = None, **fields: Any) -> ItemInput:
    """An item that is `content`; a grid of rows x columns merged patches, one row of them by default."""
    if plan is None:
        columns = columns or rows
        plan = plan_of([PLAIN.placeholder_id["image"]] * rows, grid=(1, 2 * rows // columns, 2 * columns))
    fields = {"digest": f"{content:064x}", "source": content} | fields
    return ItemInput(plan, np.full((plan.encoder_tokens, 1), content), **fields)


def talk(*parts: int | list[int] | ItemInput, processor: Any = GRID, **options: Any) -> PreparedPrompt:
    """A prompt of so many text tokens, given tokens and items, in order; text counts up, so it differs everywhere."""
    ids, items = [], []
    for part in parts:
        if isinstance(part, list):
            ids += part
        elif isinstance(part, int):
            ids += [len(ids) % 50 + 1 + k for k in range(part)]
        else:
            ids.append(processor.placeholder_id[part.plan.modality])
            items.append(part)
    return prepare_prompt(np.asarray(ids, np.int32), items, processor, vocab_size=VOCAB, **options)


def merged(prompt: PreparedPrompt) -> np.ndarray:
    """What the decoder must see of a prompt: ids, with rows in their places."""
    values = prompt.token_ids.astype(np.int64)
    for placed in prompt.items:
        rows = range(len(placed.row_positions))
        given = placed.embedding
        values[placed.row_positions] = [row_value(placed.source, i) for i in rows] if given is None else given[:, 0]
    return values


def next_token(values: np.ndarray, positions: np.ndarray) -> int:
    return zlib.crc32(np.stack([values, np.asarray(AXES) @ positions]).astype(np.int64).tobytes()) % VOCAB


def expected(prompt: PreparedPrompt, count: int) -> list[int]:
    """The answer, token by token, without an engine."""
    values, positions, tokens = merged(prompt), prompt.positions.astype(np.int64), []
    for _ in range(count):
        tokens.append(next_token(values, positions))
        at = np.full((3, 1), len(values) + prompt.position_delta)
        values, positions = np.append(values, tokens[-1]), np.concatenate([positions, at], axis=1)
    return tokens


class StubEncoder:
    """Writes the rows that an item must have. `calls` are lists of contents, `fail` may raise before one."""

    def __init__(self, pool_rows: int, bucket: EncoderBucket, fail: Callable[[list[int]], None] | None):
        self.buckets, self.processor, self.pool_rows = (bucket,), GRID, pool_rows
        self.calls: list[list[int]] = []
        self.fail = fail or (lambda contents: None)
        self.allocate()

    @property
    def encoded(self) -> list[int]:
        return [content for call in self.calls for content in call]

    def allocate(self) -> None:
        self.pool = np.full(self.pool_rows, NOTHING)

    def pack(self, items: Sequence[Any], bucket: EncoderBucket) -> list[tuple[int, int]]:
        packed = [(int(i.patches[0, 0]), i.plan.rows) for i in items]
        self.fail([content for content, _ in packed])
        return packed

    def encode(self, inputs: list[tuple[int, int]], slots: Sequence[np.ndarray], bucket: EncoderBucket) -> None:
        self.calls.append([content for content, _ in inputs])
        for (content, rows), where in zip(inputs, slots, strict=True):
            self.pool[where] = [row_value(content, i) for i in range(rows)]

    def write(self, rows: np.ndarray, slots: np.ndarray) -> None:
        self.pool[slots] = rows[:, 0]

    def read(self, slots: np.ndarray) -> np.ndarray:
        return self.pool[slots][:, None].astype(np.float32)


class StubText:
    """Keeps in each KV slot the value and the position that were prefilled there."""

    def __init__(self, layout: Layout, encoder: StubEncoder, sequences: int):
        self.layout, self.encoder, self.sequences = layout, encoder, sequences
        self.rows_per_step: list[int] = []
        self.allocate()

    def allocate(self) -> None:
        self.kv = np.full((self.layout.kv_slots, 2), NOTHING)
        self.last = np.full(self.layout.num_slots, NOTHING)

    def begin(self, request: Request) -> None:
        pass

    def prefill(self, chunks: list, row_slots: Callable) -> Any:
        tokens = sum(map(len, chunks)) + 3  # and padding
        arrays = prefill_arrays(chunks, tokens, self.sequences, self.layout, row_slots)
        row_index = arrays["row_index"]
        uses_row = row_index < self.layout.pool_rows
        assert (arrays["token_ids"][uses_row] == 0).all()
        rows = self.encoder.pool[np.where(uses_row, row_index, 0)]
        values = np.where(uses_row, rows, arrays["token_ids"])
        self.rows_per_step.append(int(uses_row.sum()))
        real = arrays["kv_slots"] < self.layout.kv_slots
        assert real.sum() == tokens - 3
        written = np.stack([values, np.asarray(AXES) @ arrays["positions"].astype(np.int64)], axis=1)
        self.kv[arrays["kv_slots"][real]] = written[real]
        sampled = np.zeros(self.sequences, np.int64)
        for row, chunk in enumerate(chunks):
            if chunk.completes:
                sampled[row] = self._next(arrays["block_tables"][row], chunk.end)
                self.last[arrays["slots"][row]] = sampled[row]
        done = [(row, chunk.request) for row, chunk in enumerate(chunks) if chunk.completes]
        return _result(done, sampled)

    def decode(self, requests: list[Request]) -> Any:
        arrays = decode_arrays(requests, len(requests) + 1, self.layout)
        sampled = np.zeros(len(requests), np.int64)
        for row in range(len(requests)):
            position = sum(AXES) * int(arrays["positions"][row])
            self.kv[arrays["kv_slots"][row]] = self.last[arrays["slots"][row]], position
            sampled[row] = self._next(arrays["block_tables"][row], arrays["seq_lens"][row])
            self.last[arrays["slots"][row]] = sampled[row]
        return _result(list(enumerate(requests)), sampled)

    def _next(self, table: np.ndarray, length: int) -> int:
        seen = self.kv[self.layout.token_slots(table, 0, int(length))]
        assert (seen != NOTHING).all()
        return zlib.crc32(np.ascontiguousarray(seen.T).tobytes()) % VOCAB


def _result(done: list[tuple[int, Request]], sampled: np.ndarray) -> Any:
    return SimpleNamespace(
        requests=[request for _, request in done],
        rows=[row for row, _ in done],
        read=lambda: SimpleNamespace(tokens=sampled),
    )


class _Media:
    """Media threads that are done when the next step begins."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def submit(self, function: Callable, *arguments: Any) -> None:
        self.tasks.append(lambda: function(*arguments))


class _NoText:
    def decode(self, token_ids: Any, **options: Any) -> str:
        return ""


class StubEngine:
    """An engine without a thread: the test takes its steps.

    Args:
      page, blocks, batch, chunk: of the KV pool and of a step.
      rows: of the row pool; `items` and `tokens` are budgets A and B.
      fail: see `StubEncoder`.
      multimodal, limits: fields of MultimodalConfig and EngineConfig.
    """

    def __init__(
        self,
        *,
        page: int = 4,
        blocks: int = 64,
        batch: int = 4,
        chunk: int = 64,
        rows: int = 100,
        items: int = 8,
        tokens: int = 400,
        readiness: str = "chunk",
        retain: bool = True,
        fail: Callable[[list[int]], None] | None = None,
        multimodal: dict | None = None,
        **limits: Any,
    ):
        config = EngineConfig(
            max_batch_size=batch,
            max_num_tokens=chunk,
            chunk_tokens=chunk,
            max_seq_len=page * blocks,
            max_prefill_sequences=batch,
            tokens_per_block=page,
            num_blocks=blocks,
            **({"disable_overlap_scheduler": True} | limits),
        )
        self.encoder = StubEncoder(rows, EncoderBucket(EncoderGraphKey(10_000, 100), 0, 10_000), fail)
        self.text = StubText(Layout(page, blocks, blocks, batch, rows, 3), self.encoder, batch)
        self.media = _Media()
        self.service = Service(
            self.text,
            self.encoder,
            config,
            MultimodalConfig(readiness=readiness, **(multimodal or {})),
            make_budgets(items=items, tokens=tokens, rows=rows, readiness=readiness, retain=retain),
            blocks,
            self.media,
            trace=StepTrace(10_000),
        )
        self.engine, self.scheduler = self.service.engine, self.service.scheduler
        self.engine.pixels.restore = self._restore
        self.restored: list[int] = []
        self.requests: list[Request] = []
        self.idle = False

    def _restore(self, items: list[Any]) -> list[np.ndarray]:
        self.restored += [placed.source for placed in items]
        return [np.full((placed.plan.encoder_tokens, 1), placed.source) for placed in items]

    def submit(self, prompt: PreparedPrompt, max_tokens: int = 4, *, embed_only: bool = False) -> Request:
        params, name = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), f"r{len(self.requests)}"
        page = self.service.tokens_per_block if prompt.reusable and not embed_only else None
        prompt = replace(prompt, items=[replace(placed) for placed in prompt.items])  # the engine drops pixels
        request = Request(
            id=name,
            prompt=prompt,
            params=params,
            handle=Handle(name, self.service.cancel),
            checker=StopChecker(params, Detokenizer(_NoText()), (), max_tokens),
            max_tokens=max_tokens,
            seed=0,
            key_tokens=prompt.key_tokens() if page else [],
            block_keys=prompt.block_keys(page) if page else [],
            embed_only=embed_only,
        )
        self.requests.append(request)
        self.service.submit(request)
        self.idle = False
        return request

    def step(self) -> bool:
        """One round of the engine's loop; False once there is nothing left to do."""
        tasks, self.media.tasks = self.media.tasks, []
        for task in tasks:
            task()
        self.idle = self.engine._turn(False) and not self.media.tasks and self.engine._inbox.empty()
        return not self.idle

    def run(self, *requests: Request, limit: int = 2_000) -> list[RequestOutput]:
        """Steps until all is done; outputs of `requests`, or of all."""
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError(f"no end after {limit} steps")
        return [request.handle.wait(0) for request in requests or self.requests]

    def answer(self, prompt: PreparedPrompt, max_tokens: int = 4) -> list[int]:
        """Tokens of a request that runs alone."""
        (output,) = self.run(self.submit(prompt, max_tokens))
        assert output.error is None, output.error
        return output.token_ids

    def assert_answers(self) -> None:
        """Every request that was not cancelled got the answer that its prompt alone gives."""
        for request in self.requests:
            output = request.handle.wait(0)
            assert output.error is None, output.error
            if output.finish_reason != "cancelled":
                assert output.token_ids == expected(request.prompt, request.max_tokens), request.id

    def assert_drained(self) -> None:
        """No page, row, slot or state is held."""
        cache = self.service.items.cache.stats()
        held = {
            "pages": self.service.pages.stats().in_use,
            "row bytes": cache.in_use_bytes + cache.reserved_bytes,
            "states": len(self.service.items._states),
            "requests": len(self.engine._requests),
            "slots": self.service.config.max_batch_size - len(self.scheduler._free_slots),
        }
        assert not any(held.values()), held
