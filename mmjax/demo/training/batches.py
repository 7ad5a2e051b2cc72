# SPDX-License-Identifier: Apache-2.0
"""Batches of fixed shapes: examples drawn, processed as in serving, and packed into slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np
from tokenizers import Tokenizer

from mmjax.demo.questions import KINDS
from mmjax.demo.scenes import COLOURS, SHAPES, Clip, Scene
from mmjax.demo.training.examples import Example, random_example
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey, ItemPlan, Modality, ProcessedItem, VideoMetadata
from mmjax.models.family import Processor

VISION_FIELDS = ("patches", "num_patches", "positions", "cu_seqlens", "window_seqlens", "row_order")
BACKGROUND, UNSURE = 0, -1
# Solid part of each kind of shape, as a share of its radius.
SOLID = {"circle": 0.95, "square": 0.7, "triangle": 0.48, "star": 0.42}
MISSES = 10  # examples in a row that fit nowhere before a batch counts as full


@dataclass(frozen=True)
class BatchShape:
    """Slots of a batch and what one slot holds: patches P, text tokens T, segments S, windows W, questions."""

    slots: int
    patches: int = 1024
    tokens: int = 768
    segments: int = 40
    windows: int = 64
    questions: int = 48
    patch_values: int = 1176

    @property
    def rows(self) -> int:
        return self.patches // 4

    @property
    def bucket(self) -> EncoderBucket:
        return EncoderBucket(EncoderGraphKey(self.patches, self.segments), self.windows, self.rows)

    def fields(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and dtype of every array of a batch."""
        per_slot = {
            "patches": ((self.patches, self.patch_values), np.uint8),
            "num_patches": ((), np.int32),
            "positions": ((self.patches, 2), np.int32),
            "cu_seqlens": ((self.segments + 1,), np.int32),
            "window_seqlens": ((self.windows + 1,), np.int32),
            "row_order": ((self.rows,), np.int32),
            "cell_colour": ((self.rows,), np.int32),
            "cell_shape": ((self.rows,), np.int32),
            "token_ids": ((self.tokens,), np.int32),
            "row_index": ((self.tokens,), np.int32),
            "rotary": ((3, self.tokens), np.int32),
            "example": ((self.tokens,), np.int32),
            "branch": ((self.tokens,), np.int32),
            "target": ((self.tokens,), np.int32),
            "question": ((self.tokens,), np.int32),
            "kinds": ((self.questions,), np.int32),
        }
        return {name: ((self.slots, *shape), dtype) for name, (shape, dtype) in per_slot.items()}


def cell_labels(scene: Scene, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """What covers each of height x width cells: colour and shape (from 1), BACKGROUND, or UNSURE near edges."""
    y = (np.arange(height)[:, None] + 0.5) * scene.height / height
    x = (np.arange(width)[None, :] + 0.5) * scene.width / width
    colour, kind = np.zeros((2, height, width), np.int32)
    for shape in scene.shapes:
        distance = np.hypot(y - shape.y, x - shape.x)
        near = distance < shape.radius + 0.7 * scene.height / height
        solid = distance < shape.radius * SOLID[shape.kind]
        solid[int(shape.y * height / scene.height), int(shape.x * width / scene.width)] = True
        for labels, value in ((colour, list(COLOURS).index(shape.colour)), (kind, SHAPES.index(shape.kind))):
            labels[near & (labels == BACKGROUND)] = UNSURE
            labels[solid] = value + 1
    return colour.reshape(-1), kind.reshape(-1)


@dataclass(frozen=True)
class _Tokens:
    """An example as tokens, before it has a place in a slot."""

    ids: np.ndarray
    rotary: np.ndarray  # [3, n]
    is_row: np.ndarray
    branch: np.ndarray
    target: np.ndarray  # the next token where an answer is being written, else -1
    question: np.ndarray  # index into `kinds`, -1 outside answers
    kinds: tuple[int, ...]


class Packer:
    """Draws examples and packs them. `source` offers random_scene, random_clip and draw; `small` as in examples."""

    def __init__(self, tokenizer: Tokenizer, processor: Processor, source: ModuleType, small: float):
        self._small = small
        self._processor, self._source = processor, source
        self._options = {m: processor.resolve(m, {}) for m in (Modality.IMAGE, Modality.VIDEO)}
        self._encode = lru_cache(1 << 16)(lambda text: tuple(tokenizer.encode(text).ids))
        self._pads = {processor.placeholder_id[m] for m in (Modality.IMAGE, Modality.VIDEO)}

    def fill(self, out: dict[str, np.ndarray], shape: BatchShape, rng: np.random.Generator, easy: bool) -> None:
        """Overwrites `out`, arrays of `shape.fields()`, with fresh examples."""
        slots: list[list[tuple[Example, list[ItemPlan], _Tokens]]] = [[] for _ in range(shape.slots)]
        used = np.zeros((shape.slots, 5), int)
        room = np.array([shape.patches, shape.segments, shape.windows, shape.tokens, shape.questions])
        misses = 0
        while misses < MISSES:
            example = random_example(rng, self._source, easy, self._small)
            plans = [self._plan(item) for item in example.media]
            tokens = self._tokenise(example, plans)
            need = np.array(
                [
                    sum(plan.encoder_tokens for plan in plans),
                    sum(len(plan.contexts) for plan in plans),
                    sum(plan.windows for plan in plans),
                    len(tokens.ids),
                    len(tokens.kinds),
                ]
            )
            fits = np.flatnonzero((used + need <= room).all(axis=1))
            if not len(fits):
                misses += 1
                continue
            misses = 0
            used[fits[0]] += need
            slots[fits[0]].append((example, plans, tokens))
        for index, contents in enumerate(slots):
            self._write({name: array[index, ...] for name, array in out.items()}, shape, contents, rng)

    def _plan(self, item: Scene | Clip) -> ItemPlan:
        if isinstance(item, Scene):
            return self._processor.plan_image(item.height, item.width, self._options[Modality.IMAGE])
        scene = item.frames[0]
        options = self._options[Modality.VIDEO]
        return self._processor.plan_video(_metadata(item), scene.height, scene.width, options)

    def _process(self, item: Scene | Clip, rng: np.random.Generator) -> ProcessedItem:
        if isinstance(item, Scene):
            return self._processor.image(self._source.draw(item, rng), self._options[Modality.IMAGE])
        frames = np.stack([self._source.draw(frame, rng) for frame in item.frames])
        return self._processor.video(frames, _metadata(item), self._options[Modality.VIDEO])

    def _tokenise(self, example: Example, plans: list[ItemPlan]) -> _Tokens:
        ids: list[int] = []
        spans, is_row, waiting = [], [], iter(plans)
        for token in self._encode(example.prefix):
            if token in self._pads:
                plan = next(waiting)
                spans.append((len(ids), plan))
                ids += plan.span_ids.tolist()
                is_row += plan.span_embed.tolist()
            else:
                ids.append(token)
                is_row.append(False)
        rotary, _ = self._processor.positions(np.array(ids, np.int32), spans)
        start = int(rotary[:, -1].max()) + 1
        pieces = [rotary]
        branch, target, question = ([0] * len(ids), [-1] * len(ids), [-1] * len(ids))
        kinds: list[int] = []
        for number, turns in enumerate(example.branches):
            before = len(ids)
            for turn, asked in enumerate(turns):
                opening = "" if turn == 0 else "\n<|im_start|>user\n"
                ask = self._encode(f"{opening}{asked.text}<|im_end|>\n<|im_start|>assistant\n")
                answer = self._encode(f"{asked.answer}<|im_end|>")
                ids += [*ask, *answer]
                target += [*[-1] * (len(ask) - 1), *answer, -1]
                question += [*[-1] * (len(ask) - 1), *[len(kinds)] * len(answer), -1]
                kinds.append(KINDS.index(asked.kind) if asked.kind in KINDS else len(KINDS))
            added = len(ids) - before
            branch += [number + 1] * added
            is_row += [False] * added
            pieces.append(np.broadcast_to(np.arange(start, start + added, dtype=np.int32), (3, added)))
        arrays = (np.array(values) for values in (is_row, branch, target, question))
        return _Tokens(np.array(ids), np.concatenate(pieces, axis=1), *arrays, tuple(kinds))

    def _write(self, slot: dict, shape: BatchShape, contents: list, rng: np.random.Generator) -> None:
        for name, filler in (("row_index", shape.rows), ("target", -1), ("question", -1), ("kinds", -1)):
            slot[name][...] = filler
        for name in ("token_ids", "rotary", "branch"):
            slot[name][...] = 0
        slot["example"][...] = -1
        for name in ("cell_colour", "cell_shape"):
            slot[name][...] = UNSURE
        items, at, row, asked = [], 0, 0, 0
        for number, (example, plans, tokens) in enumerate(contents):
            span = slice(at, at + len(tokens.ids))
            rows = int(tokens.is_row.sum())
            slot["token_ids"][span] = tokens.ids
            slot["row_index"][span][tokens.is_row] = np.arange(row, row + rows)
            slot["rotary"][:, span] = tokens.rotary
            slot["example"][span], slot["branch"][span] = number, tokens.branch
            slot["target"][span] = tokens.target
            slot["question"][span] = np.where(tokens.question >= 0, tokens.question + asked, -1)
            slot["kinds"][asked : asked + len(tokens.kinds)] = tokens.kinds
            at, asked = span.stop, asked + len(tokens.kinds)
            for item, plan in zip(example.media, plans, strict=True):
                items.append(self._process(item, rng))
                steps, height, width = plan.grid[0], plan.grid[1] // 2, plan.grid[2] // 2
                scenes = (item,) if isinstance(item, Scene) else item.frames[: 2 * steps : 2]
                for scene in scenes:
                    end = row + height * width
                    slot["cell_colour"][row:end], slot["cell_shape"][row:end] = cell_labels(scene, height, width)
                    row = end
        packed = self._processor.pack(items, shape.bucket)
        for name in VISION_FIELDS:
            slot[name][...] = getattr(packed, name)


def _metadata(clip: Clip) -> VideoMetadata:
    count = len(clip.frames)
    return VideoMetadata(count, clip.fps, tuple(range(count)))
