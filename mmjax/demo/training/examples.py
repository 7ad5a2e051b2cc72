# SPDX-License-Identifier: Apache-2.0
"""Training examples: a conversation about pictures, several questions hanging off one shared beginning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mmjax.demo.questions import Question, ask_clip, ask_pictures, ask_scene, vary
from mmjax.demo.scenes import MAX_SIDE, Clip, Scene, random_scene, random_size
from mmjax.demo.training.assets import NO_PICTURE, SMALL_TALK, SYSTEM

# How often a question is asked where the scene allows it, beside the other questions of the same scene.
WEIGHTS = {
    "caption": 4.0,
    "count": 1.5,
    "colour": 1.5,
    "relation": 3.0,
    "shape": 0.7,
    "exists": 0.7,
    "count_kind": 0.7,
    "pair": 4.0,
    "nth": 2.5,
    "motion": 4.0,
    "mover": 1.0,
    "clip": 1.5,
}
BRANCHES = 8  # questions of one example at most


@dataclass(frozen=True)
class Example:
    """A chat about `media`.

    Attributes:
      prefix: the rendered chat up to where the branches part, with one placeholder an item.
      branches: continuations that know nothing of each other; each is a list of turns, asked and answered.
    """

    media: tuple[Scene | Clip, ...]
    prefix: str
    branches: tuple[tuple[Question, ...], ...]


def _choose(questions: list[Question], rng: np.random.Generator, count: int) -> list[Question]:
    """Up to `count` of the questions, drawn by the weights of their kinds, whatever their numbers."""
    if not questions:
        return []
    number = Counter(question.kind for question in questions)
    weights = np.array([WEIGHTS[question.kind] / number[question.kind] for question in questions])
    size = min(count, len(questions))
    chosen = rng.choice(len(questions), size=size, replace=False, p=weights / weights.sum())
    return [questions[i] for i in chosen]


def _asked(question: Question, rng: np.random.Generator) -> Question:
    return Question(question.kind, vary(question.text, rng), question.answer)


def _pads(media: tuple[Scene | Clip, ...], numbered: bool = False) -> str:
    parts, pictures, videos = [], 0, 0
    for item in media:
        if isinstance(item, Clip):
            videos += 1
            label, pad = f"Video {videos}: ", "<|video_pad|>"
        else:
            pictures += 1
            label, pad = f"Picture {pictures}: ", "<|image_pad|>"
        parts.append(f"{label if numbered else ''}<|vision_start|>{pad}<|vision_end|>")
    return "".join(parts)


def _opening(text: str) -> str:
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{text}"


def _talk(rng: np.random.Generator) -> Example:
    """Small talk, or a question that lacks its picture."""
    ask, answer = SMALL_TALK[rng.integers(len(SMALL_TALK))]
    if rng.random() < 0.6:
        ask, answer = ask_scene(random_scene(rng), rng)[rng.integers(2)].text, NO_PICTURE
    return Example((), _opening(""), ((_asked(Question("talk", ask, answer), rng),),))


def _media(
    rng: np.random.Generator, source: ModuleType, easy: bool, small: float
) -> tuple[tuple[Scene | Clip, ...], list[Question]]:
    draw = rng.random()
    size = random_size(rng, high=MAX_SIDE // 2) if rng.random() < small else None
    if draw < 0.54 or (easy and draw < 0.8):
        scene = source.random_scene(rng, int(rng.integers(1, 3)) if easy else None, size)
        return (scene,), ask_scene(scene, rng)
    if draw < 0.76 and not easy:
        scenes = tuple(source.random_scene(rng, None, size) for _ in range(2 if rng.random() < 0.85 else 3))
        return scenes, ask_pictures(scenes, rng)
    clip = source.random_clip(rng)
    return (clip,), ask_clip(clip, rng)


def random_example(rng: np.random.Generator, source: ModuleType, easy: bool, small: float) -> Example:
    """A picture, two or three pictures, a clip, or small talk.

    Args:
      source: offers random_scene and random_clip.
      easy: keep to one picture of one or two shapes, or a clip.
      small: share of examples whose pictures have sides of at most half the largest.
    """
    if rng.random() < 0.015:
        return _talk(rng)
    media, questions = _media(rng, source, easy, small)
    chosen = [_asked(question, rng) for question in _choose(questions, rng, BRANCHES)]
    pads = _pads(media, numbered=rng.random() < 0.1)
    form = rng.random()
    if chosen and form < 0.1:  # the question comes before the pictures
        first = chosen[0]
        return Example(media, _opening(first.text + pads), ((Question(first.kind, "", first.answer),),))
    branches = [(question,) for question in chosen]
    if len(media) == 1 and form < 0.15:  # another picture, asked and answered, came before
        earlier = source.random_scene(rng, None, random_size(rng, high=MAX_SIDE // 2))
        before = _asked(ask_scene(earlier, rng)[0], rng)
        pads = f"{_pads((earlier,))}{before.text}<|im_end|>\n<|im_start|>assistant\n{before.answer}<|im_end|>\n"
        pads += f"<|im_start|>user\n{_pads(media)}"
        media = (earlier, *media)
    elif len(branches) > 2 and form < 0.4:  # some conversations go on
        branches = [*branches[:-2], (chosen[-2], chosen[-1])]
    return Example(media, _opening(pads), tuple(branches))
