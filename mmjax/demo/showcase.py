# SPDX-License-Identifier: Apache-2.0
"""Scenes to show: pictures, pairs and clips drawn from a seed, with questions to ask and their true answers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
from jaxtyping import UInt8

from mmjax.demo.questions import MAIN_KINDS, Question, ask_clip, ask_pictures, ask_scene, in_clear_order
from mmjax.demo.scenes import draw, random_clip, random_scene


@dataclass(frozen=True)
class DemoScene:
    """What to show and what to ask.

    Attributes:
      images: one picture, or two for questions that compare.
      video: frames of a clip, or None.
      fps: frames a second of the clip.
      questions: texts and true answers, at most one of each kind.
    """

    images: tuple[UInt8[np.ndarray, "height width 3"], ...]
    questions: tuple[Question, ...]
    video: UInt8[np.ndarray, "frames height width 3"] | None = None
    fps: float | None = None

    @property
    def image(self) -> UInt8[np.ndarray, "height width 3"]:
        """The first picture."""
        return self.images[0]


def _one_of_each(questions: list[Question]) -> tuple[Question, ...]:
    first = {question.kind: question for question in reversed(questions) if question.answer != "nothing"}
    return tuple(first[kind] for kind in MAIN_KINDS if kind in first)


def demo_scene(seed: int = 0, size: tuple[int, int] = (336, 224)) -> DemoScene:
    """A picture of two or three shapes whose order is clear, and a question of every kind about it."""
    for attempt in count():
        rng = np.random.default_rng((seed, attempt))
        scene = random_scene(rng, int(rng.integers(2, 4)), size)
        questions = _one_of_each(ask_scene(scene))
        if in_clear_order(scene) and len(questions) == 4:
            break
    return DemoScene((draw(scene, rng),), questions)


def demo_pair(seed: int = 0, size: tuple[int, int] = (224, 224)) -> DemoScene:
    """Two pictures, and which of them holds something."""
    for attempt in count():
        rng = np.random.default_rng((seed, attempt))
        scenes = [random_scene(rng, int(rng.integers(1, 3)), size) for _ in range(2)]
        questions = _one_of_each(ask_pictures(scenes))
        if questions:
            break
    return DemoScene(tuple(draw(scene, rng) for scene in scenes), questions)


def demo_clip(seed: int = 0, size: tuple[int, int] = (168, 168), frames: int = 8) -> DemoScene:
    """A clip at two frames a second, and which way a shape moves in it."""
    for attempt in count():
        rng = np.random.default_rng((seed, attempt))
        clip = random_clip(rng, size, frames)
        questions = _one_of_each(ask_clip(clip))
        if questions:
            break
    return DemoScene((), questions, np.stack([draw(frame, rng) for frame in clip.frames]), 2.0)
