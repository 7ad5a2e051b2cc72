# SPDX-License-Identifier: Apache-2.0
"""Questions about drawn scenes and their true answers. Ambiguous questions are never asked."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.demo.scenes import COLOURS, SHAPES, Clip, Scene, Shape

NUMBERS = ("none", "one", "two", "three", "four")
ORDINALS = ("first", "second", "third", "fourth")

# The first phrasing of each kind is the one that the command line and the notebook suggest.
PHRASINGS: dict[str, tuple[str, ...]] = {
    "caption": (
        "What is in the picture?",
        "What is in the picture, from left to right?",
        "What is in the image?",
        "What do you see?",
        "Describe the picture.",
        "Describe the image.",
        "What shapes are in the picture?",
        "Which shapes do you see, left to right?",
        "What is in this picture?",
        "What's in the picture?",
        "What can you see?",
        "What is in the picture, left to right?",
        "List the shapes from left to right.",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes are in the picture?",
        "How many shapes do you see?",
        "How many shapes?",
        "How many shapes are in the image?",
        "Count the shapes.",
        "How many shapes can you see?",
        "How many objects are there?",
    ),
    "count_kind": ("How many {plural} are there?", "How many {plural} are in the picture?", "How many {plural}?"),
    "colour": (
        "What colour is the {kind}?",
        "Which colour is the {kind}?",
        "What is the colour of the {kind}?",
        "What colour does the {kind} have?",
        "What colour is the {kind} in the picture?",
    ),
    "shape": ("Which shape is {colour}?", "What shape is {colour}?", "What is {colour}?"),
    "exists": ("Is there a {thing}?", "Is there a {thing} in the picture?", "Do you see a {thing}?"),
    "relation": (
        "Which shape is {side} the {thing}?",
        "What is {side} the {thing}?",
        "What shape is {side} the {thing}?",
        "Which shape do you see {side} the {thing}?",
    ),
    "pair": (
        "Which picture has the {thing}?",
        "Which picture has a {thing}?",
        "Which image has the {thing}?",
        "Which picture shows the {thing}?",
        "In which picture is the {thing}?",
        "Which picture contains the {thing}?",
        "Which of the pictures has the {thing}?",
    ),
    "nth": (
        "What is in the {nth} picture?",
        "What is in the {nth} image?",
        "Describe the {nth} picture.",
    ),
    "motion": (
        "Which way does the {thing} move?",
        "In which direction does the {thing} move?",
        "Which direction does the {thing} move?",
        "Where does the {thing} move?",
        "Which way is the {thing} moving?",
        "Which way does the {thing} go?",
        "What direction does the {thing} move in?",
    ),
    "mover": ("Which shape moves?", "What moves?", "Which shape is moving?"),
    "clip": ("What is in the video?", "What is in the clip?", "Describe the video."),
}
KINDS = tuple(PHRASINGS)
MAIN_KINDS = ("caption", "count", "colour", "relation", "pair", "motion")

SIDES: dict[str, tuple[str, ...]] = {
    "left": ("to the left of", "left of", "on the left of"),
    "right": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}


@dataclass(frozen=True)
class Question:
    """A question of one of `KINDS` and its true answer."""

    kind: str
    text: str
    answer: str


def with_article(noun: str) -> str:
    """`a red circle`, `an orange star`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def caption(shapes: Sequence[Shape]) -> str:
    """All shapes from left to right: `a red circle, a blue square and a green star`."""
    nouns = [with_article(shape.name) for shape in sorted(shapes, key=lambda shape: shape.x)]
    return nouns[0] if len(nouns) == 1 else f"{', '.join(nouns[:-1])} and {nouns[-1]}"


def in_clear_order(scene: Scene) -> bool:
    """Whether left to right is beyond doubt: neighbouring centres lie a twentieth of the width or more apart."""
    xs = sorted(shape.x for shape in scene.shapes)
    return all(b - a >= max(6.0, scene.width / 20) for a, b in itertools.pairwise(xs))


def _pick(rng: np.random.Generator | None, options: Sequence[str]) -> str:
    """The first option without an rng; with one, the first in a third of the draws and any otherwise."""
    if rng is None or rng.random() < 1 / 3:
        return options[0]
    return options[int(rng.integers(len(options)))]


def _names(shapes: Sequence[Shape], index: int) -> list[str]:
    """Unambiguous names of a shape, the shortest first; empty if it has a double."""
    shape, kinds, names = shapes[index], Counter(s.kind for s in shapes), Counter(s.name for s in shapes)
    if names[shape.name] > 1:
        return []
    return [shape.kind, shape.name] if kinds[shape.kind] == 1 else [shape.name]


def neighbours(scene: Scene, index: int, side: str) -> list[int] | None:
    """Shapes that lie clearly on that side of shape `index`; None if any shape's side is in doubt."""
    axis, sign = {"left": ("x", -1), "right": ("x", 1), "above": ("y", -1), "below": ("y", 1)}[side]
    margin = max(6.0, (scene.width if axis == "x" else scene.height) / 20)
    here = getattr(scene.shapes[index], axis)
    offsets = [sign * (getattr(shape, axis) - here) for shape in scene.shapes]
    others = [(i, offset) for i, offset in enumerate(offsets) if i != index]
    if any(abs(offset) < margin for _, offset in others):
        return None
    return [i for i, offset in others if offset > 0]


def _relations(scene: Scene, rng: np.random.Generator | None) -> list[Question]:
    questions = []
    for index in range(len(scene.shapes)):
        names = _names(scene.shapes, index)
        for side, words in SIDES.items():
            found = neighbours(scene, index, side)
            if not names or found is None or len(found) > 1 or len(scene.shapes) == 1:
                continue
            if not found and rng is not None and rng.random() < 0.75:
                continue  # "nothing" would be the commonest answer otherwise
            text = _pick(rng, PHRASINGS["relation"]).format(side=_pick(rng, words), thing=_pick(rng, names))
            answer = f"the {scene.shapes[found[0]].name}" if found else "nothing"
            questions.append(Question("relation", text, answer))
    return questions


def _exists(scene: Scene, rng: np.random.Generator) -> Question:
    names = {shape.name for shape in scene.shapes}
    kinds = {shape.kind for shape in scene.shapes}
    kind, colour = SHAPES[rng.integers(4)], list(COLOURS)[rng.integers(8)]
    if rng.random() < 0.5:
        shape = scene.shapes[rng.integers(len(scene.shapes))]
        kind, colour = (shape.kind, shape.colour) if rng.random() < 0.6 else (shape.kind, colour)
    thing = kind if rng.random() < 0.5 else f"{colour} {kind}"
    answer = "yes" if thing in kinds | names else "no"
    text = _pick(rng, PHRASINGS["exists"]).format(thing=thing)
    return Question("exists", text.replace("a orange", "an orange"), answer)


def ask_scene(scene: Scene, rng: np.random.Generator | None = None) -> list[Question]:
    """Every question that this scene answers without doubt. With `rng`, phrasings vary; without, the first is taken."""
    kinds = Counter(shape.kind for shape in scene.shapes)
    colours = Counter(shape.colour for shape in scene.shapes)
    questions = [Question("count", _pick(rng, PHRASINGS["count"]), NUMBERS[len(scene.shapes)])]
    if in_clear_order(scene):
        questions.append(Question("caption", _pick(rng, PHRASINGS["caption"]), caption(scene.shapes)))
    for shape in scene.shapes:
        if kinds[shape.kind] == 1:
            text = _pick(rng, PHRASINGS["colour"]).format(kind=shape.kind)
            questions.append(Question("colour", text, shape.colour))
        if colours[shape.colour] == 1:
            text = _pick(rng, PHRASINGS["shape"]).format(colour=shape.colour)
            questions.append(Question("shape", text, with_article(shape.kind)))
    questions += _relations(scene, rng)
    if rng is not None:
        kind = SHAPES[rng.integers(4)]
        text = _pick(rng, PHRASINGS["count_kind"]).format(plural=f"{kind}s")
        questions += [Question("count_kind", text, NUMBERS[kinds[kind]]), _exists(scene, rng)]
    return questions


def ask_pictures(scenes: Sequence[Scene], rng: np.random.Generator | None = None) -> list[Question]:
    """Which of several pictures holds something that exactly one of them holds, and what a given one shows."""
    questions = []
    holders: dict[str, list[int]] = {}
    for i, scene in enumerate(scenes):
        for thing in {s.kind for s in scene.shapes} | {s.name for s in scene.shapes}:
            holders.setdefault(thing, []).append(i)
    for thing in sorted(holders, key=lambda thing: (" " in thing, thing)):
        if len(holders[thing]) == 1:
            text = _pick(rng, PHRASINGS["pair"]).format(thing=thing).replace("a orange", "an orange")
            questions.append(Question("pair", text, f"the {ORDINALS[holders[thing][0]]}"))
    for i, scene in enumerate(scenes):
        if in_clear_order(scene):
            text = _pick(rng, PHRASINGS["nth"]).format(nth=ORDINALS[i])
            questions.append(Question("nth", text, caption(scene.shapes)))
    return questions


def ask_clip(clip: Clip, rng: np.random.Generator | None = None) -> list[Question]:
    """Which way the moving shape goes, which one moves, and what the clip shows if its order never changes."""
    questions = []
    shapes = clip.frames[0].shapes
    for index, way in clip.moving.items():
        names = _names(shapes, index)
        if names:
            text = _pick(rng, PHRASINGS["motion"]).format(thing=_pick(rng, names))
            questions.append(Question("motion", text, way))
        if len(clip.moving) == 1:
            questions.append(Question("mover", _pick(rng, PHRASINGS["mover"]), f"the {shapes[index].name}"))
    told = {caption(frame.shapes) for frame in clip.frames}
    if len(told) == 1 and all(in_clear_order(frame) for frame in clip.frames):
        questions.append(Question("clip", _pick(rng, PHRASINGS["clip"]), told.pop()))
    return questions


def vary(text: str, rng: np.random.Generator) -> str:
    """The question as people type it: other case, spelling and punctuation."""
    if rng.random() < 0.3:
        text = text.replace("colour", "color")
    if rng.random() < 0.25:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    if rng.random() < 0.03:
        text = text.upper()
    if rng.random() < 0.03:
        text = f"{text} "
    return text
