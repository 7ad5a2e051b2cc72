# SPDX-License-Identifier: Apache-2.0
"""The demo's scenes and questions: legal sizes, shapes that never touch, answers that follow from the scene."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mmjax.demo import demo_clip, demo_pair, demo_scene
from mmjax.demo.questions import MAIN_KINDS, ask_clip, ask_pictures, ask_scene, caption, neighbours
from mmjax.demo.scenes import DIRECTIONS, MAX_SIDE, MIN_SIDE, Scene, Shape, draw, random_clip, random_scene, random_size
from mmjax.demo.training import plain_scenes

WHITE = (255, 255, 255)


def _shape(kind: str, colour: str, x: float, y: float) -> Shape:
    return Shape(kind, colour, (200, 0, 0), x, y, 20.0)


ROW = Scene(
    224,
    112,
    WHITE,
    (_shape("square", "blue", 190, 60), _shape("circle", "orange", 30, 50), _shape("star", "red", 110, 80)),
)


def test_questions_about_a_known_scene():
    answers = {question.text: question.answer for question in ask_scene(ROW)}
    assert answers["What is in the picture?"] == "an orange circle, a red star and a blue square"
    assert answers["How many shapes are there?"] == "three"
    assert answers["What colour is the circle?"] == "orange"
    assert answers["Which shape is to the left of the star?"] == "the orange circle"
    assert answers["Which shape is to the right of the star?"] == "the blue square"
    assert answers["Which shape is to the left of the circle?"] == "nothing"


def test_doubtful_questions_are_not_asked():
    level = Scene(224, 112, WHITE, (_shape("square", "blue", 100, 30), _shape("circle", "red", 104, 80)))
    kinds = {question.kind for question in ask_scene(level)}
    assert "caption" not in kinds
    assert neighbours(level, 0, "left") is None
    assert neighbours(level, 0, "below") == [1]
    twins = Scene(224, 112, WHITE, (_shape("star", "red", 30, 50), _shape("star", "blue", 180, 50)))
    assert "colour" not in {question.kind for question in ask_scene(twins)}


def test_questions_about_two_pictures():
    other = Scene(112, 112, WHITE, (_shape("triangle", "red", 50, 50),))
    answers = {question.text: question.answer for question in ask_pictures([ROW, other])}
    assert answers["Which picture has the triangle?"] == "the second"
    assert answers["Which picture has the orange circle?"] == "the first"
    assert answers["What is in the second picture?"] == "a red triangle"


@pytest.mark.parametrize("source", ["own", "plain"])
def test_shapes_lie_inside_and_apart(source: str):
    make = random_scene if source == "own" else plain_scenes.random_scene
    for seed in range(100):
        scene = make(np.random.default_rng(seed))
        assert 1 <= len(scene.shapes) <= 4
        for shape in scene.shapes:
            assert shape.x - shape.radius >= 0
            assert shape.x + shape.radius <= scene.width
            assert shape.y - shape.radius >= 0
            assert shape.y + shape.radius <= scene.height
        for a, b in itertools.combinations(scene.shapes, 2):
            # Plain scenes keep boxes apart, which is as good.
            boxes = max(abs(a.x - b.x), abs(a.y - b.y)) > a.radius + b.radius
            assert boxes or math.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius


def test_sizes_are_those_promised():
    rng = np.random.default_rng(0)
    for _ in range(500):
        sides = random_size(rng)
        assert min(sides) >= MIN_SIDE
        assert max(sides) <= MAX_SIDE
        assert max(sides) <= 2 * min(sides) + 28


def test_clips_move_the_way_they_say():
    for seed in range(50):
        clip = random_clip(np.random.default_rng(seed))
        assert 4 <= len(clip.frames) <= 16
        first, last = clip.frames[0].shapes, clip.frames[-1].shapes
        for index, (a, b) in enumerate(zip(first, last, strict=True)):
            moved = (round(np.sign(round(b.x - a.x, 6))), round(np.sign(round(b.y - a.y, 6))))
            assert moved == (DIRECTIONS[clip.moving[index]] if index in clip.moving else (0, 0))
        assert all(question.answer in DIRECTIONS for question in ask_clip(clip) if question.kind == "motion")


def test_drawing_is_repeatable_and_shows_the_colours():
    scene = random_scene(np.random.default_rng(3), 1, (224, 168))
    pixels = draw(scene, np.random.default_rng(0))
    assert pixels.shape == (168, 224, 3)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, draw(scene, np.random.default_rng(0)))
    flat = draw(Scene(112, 112, WHITE, (_shape("circle", "red", 56, 56),), smooth=False), np.random.default_rng(0))
    assert tuple(flat[56, 56]) == (200, 0, 0)
    assert tuple(flat[2, 2]) == WHITE


def test_demo_scenes_ask_one_question_of_each_kind():
    for seed in range(5):
        kinds = [q.kind for make in (demo_scene, demo_pair, demo_clip) for q in make(seed).questions]
        assert kinds == list(MAIN_KINDS)
    assert demo_scene(1).questions == demo_scene(1).questions
    assert caption(ROW.shapes) == "an orange circle, a red star and a blue square"
