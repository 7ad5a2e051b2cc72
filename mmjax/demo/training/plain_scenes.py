# SPDX-License-Identifier: Apache-2.0
"""A second, independent renderer, for evaluation alone: named colours, whole pixels, plain Pillow calls.

It offers what `mmjax.demo.scenes` offers (`random_scene`, `random_clip`, `draw`) and shares only the records.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageColor, ImageDraw

from mmjax.demo.scenes import DIRECTIONS, SHAPES, Clip, Scene, Shape

PALETTE = {
    "red": ("red", "crimson"),
    "orange": ("orange", "darkorange"),
    "yellow": ("yellow", "gold"),
    "green": ("green", "limegreen"),
    "cyan": ("cyan", "darkturquoise"),
    "blue": ("blue", "royalblue"),
    "purple": ("purple", "darkviolet"),
    "pink": ("hotpink", "lightpink"),
}
BACKGROUNDS = ("white", "whitesmoke", "lightgray", "gainsboro", "ivory", "black", "#141820", "#202020", "#28282d")
SIZES = ((224, 224), (320, 240), (448, 448), (300, 200), (128, 128), (256, 256), (400, 300), (448, 224), (180, 320))


def _colour(rng: np.random.Generator, background: tuple[int, int, int]) -> tuple[str, tuple[int, int, int]]:
    while True:
        name = list(PALETTE)[rng.integers(8)]
        rgb = ImageColor.getrgb(PALETTE[name][rng.integers(2)])
        if math.dist(rgb, background) > 75:
            return name, rgb


def random_scene(rng: np.random.Generator, count: int | None = None, size: tuple[int, int] | None = None) -> Scene:
    """Shapes in distinct cells of a coarse grid, somewhat off centre, all about as large."""
    width, height = size or SIZES[rng.integers(len(SIZES))]
    count = count or int(rng.integers(1, 5))
    background = ImageColor.getrgb(BACKGROUNDS[rng.integers(len(BACKGROUNDS))])
    columns, rows = (count, 1) if rng.random() < 0.3 else (3 if width > height else 2, 2 if width >= height else 3)
    cell_w, cell_h = width // columns, height // rows
    largest = min(cell_w, cell_h) // 2 - 2
    shapes = []
    for cell in rng.permutation(columns * rows)[:count]:
        radius = int(rng.integers(max(12, largest // 2), max(13, largest + 1)))
        slack_x, slack_y = cell_w // 2 - radius - 1, cell_h // 2 - radius - 1
        x = int(cell % columns) * cell_w + cell_w // 2 + int(rng.integers(-slack_x, slack_x + 1))
        y = int(cell // columns) * cell_h + cell_h // 2 + int(rng.integers(-slack_y, slack_y + 1))
        name, rgb = _colour(rng, background)
        waist = 0.5 if rng.random() < 0.5 else 0.4
        shapes.append(Shape(SHAPES[rng.integers(4)], name, rgb, x, y, radius, waist=waist))
    return Scene(width, height, background, tuple(shapes), smooth=False)


def random_clip(rng: np.random.Generator) -> Clip:
    """One shape crosses half of the picture or more along a lane of its own; in half of the clips another rests."""
    width, height = SIZES[rng.integers(len(SIZES))]
    length, way = int(rng.integers(4, 17)), list(DIRECTIONS)[rng.integers(4)]
    dx, dy = DIRECTIONS[way]
    across, side = (height, width) if dx else (width, height)
    radius = int(rng.integers(12, across // 5))
    template = random_scene(rng, 1, (width, height))
    background = template.background
    lane, start, stop = across // 4, radius + 2, side - radius - 2
    stop = int(rng.integers((start + stop) // 2 + 8, stop + 1))
    if dx + dy < 0:
        start, stop = side - start, side - stop
    name, rgb = _colour(rng, background)
    kind, other_kind = rng.permutation(SHAPES)[:2]
    rest = []
    if rng.random() < 0.5:
        name_2, rgb_2 = _colour(rng, background)
        x, y = (side // 2, across - lane) if dx else (across - lane, side // 2)
        rest = [Shape(str(other_kind), name_2, rgb_2, x, y, min(radius, across // 6))]
    frames = []
    for i in range(length):
        along = start + round((stop - start) * i / (length - 1))
        x, y = (along, lane) if dx else (lane, along)
        mover = Shape(str(kind), name, rgb, x, y, radius)
        frames.append(Scene(width, height, background, (mover, *rest), smooth=False))
    return Clip(tuple(frames), {0: way}, None if rng.random() < 0.5 else float(rng.choice((2.0, 10.0))))


def draw(scene: Scene, rng: np.random.Generator) -> UInt8[np.ndarray, "height width 3"]:
    """Renders a scene; `rng` is not needed."""
    image = Image.new("RGB", (scene.width, scene.height), scene.background)
    pen = ImageDraw.Draw(image)
    for shape in scene.shapes:
        x, y, r = int(shape.x), int(shape.y), int(shape.radius)
        if shape.kind == "circle":
            pen.ellipse([x - r, y - r, x + r, y + r], fill=shape.rgb)
        elif shape.kind == "square":
            half = int(r * 0.8)
            pen.rectangle([x - half, y - half, x + half, y + half], fill=shape.rgb)
        elif shape.kind == "triangle":
            pen.polygon([(x, y - r), (x - r, y + r * 3 // 4), (x + r, y + r * 3 // 4)], fill=shape.rgb)
        else:
            points = []
            for i in range(10):
                reach = r if i % 2 == 0 else r * shape.waist
                angle = math.pi * i / 5 - math.pi / 2
                points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
            pen.polygon(points, fill=shape.rgb)
    return np.asarray(image, np.uint8)
