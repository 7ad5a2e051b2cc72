# SPDX-License-Identifier: Apache-2.0
"""Accuracy on unseen scenes, word for word, of anything that answers: `python -m mmjax.demo.training.evaluate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from mmjax.demo import checkpoint_path, scenes
from mmjax.demo.questions import MAIN_KINDS, Question, ask_clip, ask_pictures, ask_scene, vary
from mmjax.demo.training import plain_scenes

RENDERERS: dict[str, ModuleType] = {"own": scenes, "plain": plain_scenes}
EVALUATION_SEED = 2_000_003


@dataclass(frozen=True)
class Case:
    """A question about pictures (uint8 arrays) or about a clip (uint8 [frames, height, width, 3])."""

    question: Question
    images: tuple[np.ndarray, ...] = ()
    video: np.ndarray | None = None
    fps: float | None = None

    def messages(self) -> list[dict]:
        """The case as one user turn, media first."""
        parts: list[dict] = [{"type": "image", "image": image} for image in self.images]
        if self.video is not None:
            parts.append({"type": "video", "video": (self.video, {"fps": self.fps}) if self.fps else self.video})
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.question.text}]}]


Answer = Callable[[Sequence[Case]], Sequence[str]]


def draw_case(kind: str, source: ModuleType, rng: np.random.Generator) -> Case:
    """A fresh scene that answers a question of `kind`, and that question in any phrasing."""
    while True:
        if kind == "motion":
            clip = source.random_clip(rng)
            drawn, questions = (), ask_clip(clip, rng)
        elif kind == "pair":
            drawn = tuple(source.random_scene(rng) for _ in range(2))
            questions = ask_pictures(drawn, rng)
        else:
            drawn = (source.random_scene(rng),)
            questions = ask_scene(drawn[0], rng)
        fitting = [q for q in questions if q.kind == kind and q.answer != "nothing"]
        if not fitting:
            continue
        chosen = fitting[rng.integers(len(fitting))]
        question = Question(kind, vary(chosen.text, rng), chosen.answer)
        if kind == "motion":
            frames = np.stack([source.draw(frame, rng) for frame in clip.frames])
            return Case(question, (), frames, clip.fps)
        return Case(question, tuple(source.draw(scene, rng) for scene in drawn))


def accuracy(answer: Answer, count: int, kinds: Sequence[str] = MAIN_KINDS, batch: int = 50) -> dict:
    """Share of `count` questions of each kind and renderer that `answer` gets right, and some it gets wrong."""
    table: dict = {}
    for name, source in RENDERERS.items():
        table[name] = {}
        for kind in kinds:
            rng = np.random.default_rng((EVALUATION_SEED, list(RENDERERS).index(name), MAIN_KINDS.index(kind)))
            wrong: list[str] = []
            for start in range(0, count, batch):
                cases = [draw_case(kind, source, rng) for _ in range(min(batch, count - start))]
                for case, text in zip(cases, answer(cases), strict=True):
                    if text != case.question.answer:
                        wrong.append(f"{case.question.text} {case.question.answer} / {text}")
            table[name][kind] = {"right": 1 - len(wrong) / count, "questions": count, "wrong": wrong[:5]}
            print(name, kind, table[name][kind], flush=True)
    return table


def by_mmjax(checkpoint: Path) -> Answer:
    """Answers through `mmjax.LLM`."""
    import mmjax

    llm = mmjax.LLM(checkpoint)
    params = mmjax.SamplingParams(max_tokens=48, temperature=0.0)
    return lambda cases: [out.text for out in llm.chat([case.messages() for case in cases], params)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=checkpoint_path())
    parser.add_argument("--count", type=int, default=1000, help="questions of each kind and renderer")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    table = accuracy(by_mmjax(args.checkpoint), args.count)
    if args.out:
        args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
