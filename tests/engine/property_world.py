# SPDX-License-Identifier: Apache-2.0
"""What the whole-engine property test plays with: machines of one model, a stock of prompts, and a judge with a memory.

Everything that costs time is made once: executables, prompts with their pixels, rows and logits of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tolerances import TIE

import mmjax
from mmjax.demo import demo_clip, demo_pair, demo_scene
from mmjax.errors import RequestError
from mmjax.frontend import Frontend, InputOptions
from mmjax.inputs.hashing import item_digest
from mmjax.inputs.items import Modality, ProcessedItem
from mmjax.inputs.prepare import prepare_prompt
from mmjax.inputs.process import media_item
from mmjax.inputs.prompt import ItemInput, PreparedPrompt
from mmjax.loading import Model, load_params, open_model
from mmjax.media import MediaOptions, open_media
from mmjax.reference.runner import ReferenceRunner
from mmjax.sampling_params import SamplingParams, SamplingRow
from mmjax.startup import Machine, build_machine

MAX_SEQ_LEN = 256
LONGEST_PROMPT = 192
CHUNK = 64
PROMPTS = 48
STEMS = 4  # prompts begin alike
# Height and width, of which sizes follow that the reference compiles for; several pictures share one.
PICTURES = ((56, 56), (56, 56), (56, 84), (84, 84), (84, 84), (112, 84), (56, 140), (140, 112))
CLIPS = ((2, 56, 56), (3, 56, 56), (5, 56, 84))


def engine_config(page: int) -> mmjax.EngineConfig:
    """Small fixed shapes, within which all limits vary."""
    return mmjax.EngineConfig(
        max_batch_size=4,
        max_num_tokens=CHUNK,
        max_seq_len=MAX_SEQ_LEN,
        tokens_per_block=page,
        num_blocks=4 * MAX_SEQ_LEN // page,
        compilation_cache=False,
    )


MULTIMODAL = mmjax.MultimodalConfig(encoder_max_num_tokens=256, encoder_cache_max_bytes="64KiB")


@dataclass
class World:
    """One model: machines by page size, items, prompts that several requests may bring, and what the reference says."""

    model: Model
    machines: dict[int, Machine]
    reference: ReferenceRunner
    stock: list[ItemInput] = field(default_factory=list)
    prompts: list[PreparedPrompt] = field(default_factory=list)
    drawn: int = 0  # how many of them random episodes draw from
    _rows: dict[Any, np.ndarray] = field(default_factory=dict)
    _logits: dict[int, list[tuple[tuple[int, ...], np.ndarray]]] = field(default_factory=dict)
    _nan: dict[int, Any] = field(default_factory=dict)

    def add(self, *parts: list[int] | ItemInput) -> int:
        """Prepares a prompt of token ids and items, and gives its number."""
        ids: list[int] = []
        for part in parts:
            ids += [self.model.processor.placeholder_id[part.plan.modality]] if isinstance(part, ItemInput) else part
        items = [part for part in parts if isinstance(part, ItemInput)]
        vocab_size = self.model.cfg.vocab_size
        self.prompts.append(prepare_prompt(np.asarray(ids), items, self.model.processor, vocab_size=vocab_size))
        return len(self.prompts) - 1

    def bring(self, index: int) -> PreparedPrompt:
        """A copy of prompt `index` whose items and pixel arrays are objects of their own, as if prepared anew."""
        prompt = self.prompts[index]
        items = [replace(item, patches=None if item.patches is None else item.patches.view()) for item in prompt.items]
        return replace(prompt, items=items)

    def release(self) -> None:
        """Lets go of the machines' arrays and executables."""
        for machine in self.machines.values():
            machine.release()

    def poison(self, page: int) -> None:
        """NaN in every page and row of a machine, so that nothing can live on what an earlier engine left behind."""
        machine = self.machines[page]
        text, encoder = machine.text, machine.encoder
        if page not in self._nan:
            self._nan[page] = jax.jit(partial(jax.tree.map, lambda x: jnp.full_like(x, jnp.nan)))
        text.state = text.state.replace(kv=self._nan[page](text.state.kv))
        encoder.pool = self._nan[page](encoder.pool)

    # ---- the judge ------------------------------------------------------------------------------------------------

    def rows(self, index: int) -> list[np.ndarray]:
        """The reference's rows of every item of a prompt, float32 [R, row_width]."""
        return [self._item_rows(item) for item in self.prompts[index].items]

    def _item_rows(self, item: Any) -> np.ndarray:
        if item.embedding is not None:
            return item.embedding
        key = (item.modality, item.plan.grid, item.patches.tobytes())
        if key not in self._rows:
            self._rows[key] = self.reference.encode(ProcessedItem(item.plan, item.patches))
        return self._rows[key]

    def logits(self, index: int, tokens: Sequence[int]) -> np.ndarray:
        """float32 [len(tokens), V]: what each of `tokens` was chosen from, the ones before it being given."""
        given, memory = tuple(tokens[:-1]), self._logits.setdefault(index, [])
        for seen, logits in memory:
            if seen[: len(given)] == given:
                return logits[: len(tokens)]
        logits = self.reference.logits(self.prompts[index], self.rows(index), given).copy()  # not a view of padding
        memory[:] = [entry for entry in memory if given[: len(entry[0])] != entry[0]]
        memory.append((given, logits))
        return logits

    def faults(
        self, index: int, tokens: Sequence[int], params: SamplingParams, seed: int, eos: tuple[int, ...]
    ) -> tuple[list[int], int]:
        """Output positions where the reference clearly takes another token, and how many were ties decided otherwise.

        Greedy choices, penalties and `min_tokens` are worked out anew here; draws are made by the engine's sampler.
        """
        if not tokens:
            return [], 0
        raw, prompt_ids = self.logits(index, tokens), self.prompts[index].token_ids
        wrong, ties = [], 0
        for step, token in enumerate(tokens):
            if params.greedy:
                scores = self._scores(raw[step], prompt_ids, tokens[:step], params, eos)
                best, near = int(scores.argmax()), scores.max() - scores[token] <= TIE
            else:
                row = SamplingRow(params, seed, step, eos)
                lifted = raw[step].copy()
                lifted[token] += TIE
                best, raised = (
                    int(self.reference.sample(logits[None], row, prompt_ids, tokens[:step]).tokens[0])
                    for logits in (raw[step], lifted)
                )
                near = raised == token
            if token != best:
                ties += bool(near)
                wrong += [] if near else [step]
        return wrong, ties

    def _scores(
        self,
        logits: np.ndarray,
        prompt_ids: np.ndarray,
        output: Sequence[int],
        params: SamplingParams,
        eos: tuple[int, ...],
    ) -> np.ndarray:
        scores = logits.astype(np.float64)
        if params.penalised:
            seen = np.unique([*prompt_ids, *output])
            factor = params.repetition_penalty
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
            ids, counts = np.unique(np.asarray(output, int), return_counts=True)
            scores[ids] -= counts * params.frequency_penalty + params.presence_penalty
        scores[list(self.model.processor.never_sampled)] = -np.inf
        if len(output) < params.min_tokens:
            scores[[*params.stop_token_ids, *(() if params.ignore_eos else eos)]] = -np.inf
        return scores


# ---- making it ----------------------------------------------------------------------------------------------------


def build_world(path: Any, pages: Sequence[int], seed: int = 0) -> World:
    """Loads the checkpoint in `path` and compiles a machine for each page size."""
    device = jax.devices()[0]
    model = open_model(path, dtype="float32", device=device)
    params = load_params(model, device=device, progress=False)
    machines = {
        page: build_machine(model, params, engine_config(page), MULTIMODAL, device=device, progress=False)
        for page in pages
    }
    banned = model.processor.never_sampled
    reference = ReferenceRunner(model.family, model.cfg, params, model.processor, device=device, banned_ids=banned)
    world = World(model, machines, reference)
    for page in pages:
        world.poison(page)
    return world


def fill_with_noise(world: World, seed: int = 0) -> World:
    """Stock and prompts for a model of random weights: pictures and clips of noise, text of random tokens."""
    rng, processor = np.random.default_rng(seed), world.model.processor
    values = [(Modality.IMAGE, (*size, 3)) for size in PICTURES]
    if Modality.VIDEO in processor.placeholder_id:
        values += [(Modality.VIDEO, (*size, 3)) for size in CLIPS]
    for modality, shape in values:
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        world.stock.append(media_item(open_media(modality, pixels, MediaOptions()), processor))
    rows = rng.normal(size=(world.stock[3].plan.rows, world.model.cfg.row_width)).astype(np.float32)
    for smaller in ({"max_pixels": 64 * 64}, {"longest_edge": 60}):
        with suppress(RequestError):  # of a family whose processor takes no such option
            world.stock.append(media_item(world.stock[4].source, processor, smaller))  # the same picture, in fewer rows
    world.stock += [
        replace(world.stock[2], digest=None),  # may not be shared
        replace(world.stock[3], patches=None, source=None, embedding=rows, digest=item_digest(rows)),
    ]
    _random_prompts(world, rng)
    world.drawn = len(world.prompts)
    return world


def _random_prompts(world: World, rng: np.random.Generator) -> None:
    """Text alone, 1 to 5 items, and prompts that go on from earlier ones, as conversations do."""
    ordinary = [i for i in range(256) if i not in world.model.processor.never_sampled]

    def text(low: int, high: int) -> list[int]:
        return rng.choice(ordinary, rng.integers(low, high + 1)).tolist()

    stems = [text(40, 40) for _ in range(STEMS)]
    drafts: list[list] = []
    while len(drafts) < PROMPTS:
        if drafts and rng.random() < 0.3:
            parts = [*drafts[rng.integers(len(drafts))], text(1, 12)]
        else:
            parts = [stems[rng.integers(STEMS)][: rng.integers(1, 41)]]
        for _ in range(rng.choice([0, 1, 2, 3, 5], p=[0.25, 0.3, 0.2, 0.15, 0.1])):
            # A few of the stock come often, so that prompts share them and one may bring an item twice.
            parts += [world.stock[min(rng.geometric(0.15) - 1, len(world.stock) - 1)], text(0, 6)]
        parts.append(text(1, 4))
        items = [part for part in parts if isinstance(part, ItemInput)]
        length = sum(part.plan.span_ids.size if isinstance(part, ItemInput) else len(part) for part in parts)
        if len(items) <= 5 and length < LONGEST_PROMPT:
            world.add(*parts)
            drafts.append(parts)


def fill_with_scenes(world: World, seed: int = 0) -> World:
    """Prompts for the demo model: conversations about drawn scenes, whose answers hang on the pictures."""
    rng = np.random.default_rng(seed)
    shown = [demo_scene(i, size) for i, size in enumerate(((56, 84), (84, 84), (112, 84), (84, 112), (112, 112)))]
    shown += [demo_pair(i, (84, 84)) for i in range(3)]
    clips = [demo_clip(i, (56, 56), 4 + i) for i in range(2)]
    with ThreadPoolExecutor(1) as media:
        frontend = Frontend(world.model, MULTIMODAL, media)
        while len(world.prompts) < PROMPTS:
            scenes = [(shown + clips)[i] for i in rng.choice(len(shown) + len(clips), rng.choice([0, 1, 1, 1, 2]))]
            messages = [{"role": "user", "content": "What can you do?"}]
            for scene in scenes:
                parts = [{"type": "image", "image": image} for image in scene.images]
                if scene.video is not None:
                    parts.append({"type": "video", "video": (list(scene.video), {"fps": scene.fps})})
                question = scene.questions[rng.integers(len(scene.questions))]
                messages += [{"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}]
                messages += [{"role": "assistant", "content": question.answer}]
            messages = messages[1:-1] or messages
            prompt = frontend.chat(messages, InputOptions(), limit=None)
            if len(prompt.token_ids) < LONGEST_PROMPT:
                world.prompts.append(prompt)
    world.drawn = len(world.prompts)
    return world
