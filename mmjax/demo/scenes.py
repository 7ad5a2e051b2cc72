# SPDX-License-Identifier: Apache-2.0
"""Drawn scenes that the demo model understands: one to four shapes on a plain background, as pictures and clips."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "star")

# A few typical values of each colour; a scene mixes two of them and adds a little jitter.
COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 40, 40), (200, 20, 35)),
    "orange": ((255, 165, 0), (255, 140, 0), (240, 130, 40)),
    "yellow": ((255, 255, 0), (250, 220, 50), (255, 215, 0)),
    "green": ((0, 128, 0), (0, 255, 0), (50, 170, 75)),
    "cyan": ((0, 255, 255), (0, 200, 220), (70, 215, 225)),
    "blue": ((0, 0, 255), (30, 80, 220), (65, 105, 225)),
    "purple": ((128, 0, 128), (145, 60, 200), (110, 20, 170)),
    "pink": ((255, 192, 203), (255, 105, 180), (240, 130, 175)),
}

DIRECTIONS = {"to the right": (1, 0), "to the left": (-1, 0), "up": (0, -1), "down": (0, 1)}
MIN_SIDE, MAX_SIDE = 112, 448


@dataclass(frozen=True)
class Shape:
    """One shape. `radius` is that of the circle around it, in pixels; `turn` is in degrees."""

    kind: str
    colour: str
    rgb: tuple[int, int, int]
    x: float
    y: float
    radius: float
    turn: float = 0.0
    waist: float = 0.45  # a star's inner radius over its outer one
    angles: tuple[float, float, float] = (
        -90.0,
        30.0,
        150.0,
    )  # where a triangle's corners lie, clockwise from the right
    outline: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        """Colour and kind, as the answers say it."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """A picture: its size, its background, its shapes and how it is rendered."""

    width: int
    height: int
    background: tuple[int, int, int]
    shapes: tuple[Shape, ...]
    smooth: bool = True  # anti-aliased edges
    noise: float = 0.0  # standard deviation in levels of 255
    jpeg: int | None = None  # JPEG quality, None for no compression


@dataclass(frozen=True)
class Clip:
    """Frames in order; `moving` gives the direction of every shape that moves, by its index. `fps` may be unknown."""

    frames: tuple[Scene, ...]
    moving: dict[int, str]
    fps: float | None


def corners(shape: Shape) -> list[tuple[float, float]]:
    """Corner points of a square, a triangle or a star, in pixels."""
    r = shape.radius
    if shape.kind == "square":
        polar = [(r, 45 + 90 * i) for i in range(4)]
    elif shape.kind == "triangle":
        polar = [(r, angle) for angle in shape.angles]
    else:
        polar = [(r if i % 2 == 0 else r * shape.waist, -90 + 36 * i) for i in range(10)]
    turned = [(radius, math.radians(angle + shape.turn)) for radius, angle in polar]
    return [(shape.x + radius * math.cos(a), shape.y + radius * math.sin(a)) for radius, a in turned]


def draw(scene: Scene, rng: np.random.Generator) -> UInt8[np.ndarray, "height width 3"]:
    """Renders a scene. `rng` supplies the noise alone."""
    side = max(scene.width, scene.height)
    scale = 2 if scene.smooth and side <= MAX_SIDE else 1
    image = Image.new("RGB", (scene.width * scale, scene.height * scale), scene.background)
    pen = ImageDraw.Draw(image)
    for shape in scene.shapes:
        style = {"fill": shape.rgb, "outline": shape.outline, "width": scale if shape.outline else 0}
        if shape.kind == "circle":
            x, y, r = shape.x * scale, shape.y * scale, shape.radius * scale
            pen.ellipse((x - r, y - r, x + r, y + r), **style)
        else:
            pen.polygon([(x * scale, y * scale) for x, y in corners(shape)], **style)
    if scale > 1:
        image = image.reduce(scale)
    if scene.jpeg is not None:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=scene.jpeg)
        image = Image.open(buffer).convert("RGB")
    pixels = np.asarray(image, np.uint8)
    if scene.noise:
        speckle = rng.standard_normal(pixels.shape, np.float32) * scene.noise
        pixels = np.clip(pixels + speckle, 0, 255).astype(np.uint8)
    return pixels


def random_colour(rng: np.random.Generator, name: str, jitter: float = 8.0) -> tuple[int, int, int]:
    """A value that people would call `name`."""
    anchors = np.asarray(COLOURS[name], float)
    first, second = anchors[rng.integers(len(anchors), size=2)]
    mixed = first + (second - first) * rng.random() + rng.normal(0, jitter, 3)
    return tuple(int(v) for v in np.clip(mixed, 0, 255))


def random_background(rng: np.random.Generator) -> tuple[int, int, int]:
    """A plain light or dark background: mostly grey, sometimes pure, with a slight tint."""
    if rng.random() < 0.2:
        return (255, 255, 255) if rng.random() < 0.6 else (0, 0, 0)
    level = rng.integers(190, 251) if rng.random() < 0.6 else rng.integers(5, 71)
    return tuple(int(v) for v in np.clip(level + rng.integers(-16, 17, 3), 0, 255))


def random_size(rng: np.random.Generator, low: int = MIN_SIDE, high: int = MAX_SIDE) -> tuple[int, int]:
    """Width and height between `low` and `high`, at most 2:1; two of three are multiples of 28, so need no resize."""
    short = low * (high / low) ** rng.random()
    long = min(high, short * (1 + rng.random() if rng.random() < 0.6 else 1))
    sides = [short, long] if rng.random() < 0.5 else [long, short]
    if rng.random() < 0.67:
        sides = [28 * round(side / 28) for side in sides]
    return int(sides[0]), int(sides[1])


def _places(rng: np.random.Generator, count: int, width: int, height: int) -> list[tuple[float, float, float]]:
    """Centres and radii of `count` circles that neither touch each other nor leave the picture."""
    short = min(width, height)
    top = short * (0.49, 0.3, 0.26, 0.24)[count - 1]
    low = max(11.0, 0.04 * short)
    alike = rng.random() < 0.3
    while True:
        top = max(low, top * 0.97)
        places: list[tuple[float, float, float]] = []
        shared = rng.uniform(low, top)
        line = rng.random()  # some scenes line their shapes up in a row or a column
        row, column = rng.uniform(0.3, 0.7) * height, rng.uniform(0.3, 0.7) * width
        for _ in range(24):
            r = shared if alike else rng.uniform(low, top)
            if 2 * r + 2 > short:
                continue
            x, y = rng.uniform(r + 1, width - r - 1), rng.uniform(r + 1, height - r - 1)
            if line < 0.25:
                y = float(np.clip(row + rng.normal(0, 3), r + 1, height - r - 1))
            elif line < 0.35:
                x = float(np.clip(column + rng.normal(0, 3), r + 1, width - r - 1))
            if all(math.hypot(x - a, y - b) > r + s + 3 for a, b, s in places):
                places.append((x, y, r))
                if len(places) == count:
                    return places


def random_shape(
    rng: np.random.Generator, place: tuple[float, float, float], background: tuple[int, int, int]
) -> Shape:
    """A shape of any kind and colour at `place` that stands out from the background."""
    x, y, radius = place
    kind, colour = SHAPES[rng.integers(4)], list(COLOURS)[rng.integers(8)]
    rgb = random_colour(rng, colour)
    while math.dist(rgb, background) < 75:
        rgb = random_colour(rng, colour)
    straight = rng.random() < 0.5
    swing = {"circle": 0, "square": 12, "triangle": 180 if rng.random() < 0.2 else 15, "star": 36}[kind]
    turn = 0.0 if straight else float(rng.uniform(-swing, swing))
    angles = (-90.0, 30.0, 150.0)
    if rng.random() < 0.6:
        angles = (-90 + rng.uniform(-25, 25), 30 + rng.uniform(-18, 18), 150 + rng.uniform(-18, 18))
    edge = None
    if rng.random() < 0.2:
        edge = ((0, 0, 0), (255, 255, 255), tuple(v // 2 for v in rgb))[rng.integers(3)]
    return Shape(kind, colour, rgb, x, y, radius, turn, float(rng.uniform(0.34, 0.54)), angles, edge)


def random_scene(rng: np.random.Generator, count: int | None = None, size: tuple[int, int] | None = None) -> Scene:
    """A scene of `count` shapes (1 to 4 when left out); a few are too large, as photographs are, and will be shrunk."""
    count = count or int(rng.integers(1, 5))
    large = rng.random() < 0.04
    width, height = size or random_size(rng, *((MAX_SIDE, 2 * MAX_SIDE) if large else (MIN_SIDE, MAX_SIDE)))
    background = random_background(rng)
    shapes = tuple(random_shape(rng, place, background) for place in _places(rng, count, width, height))
    noise = float(rng.uniform(1, 6)) if rng.random() < 0.1 else 0.0
    jpeg = int(rng.integers(60, 96)) if rng.random() < 0.12 else None
    return Scene(width, height, background, shapes, bool(rng.random() < 0.5), noise, jpeg)


def _path(rng: np.random.Generator, shape: Shape, way: str, scene: Scene) -> tuple[Shape, tuple[float, float]]:
    """The shape at the start of a straight way, and the vector it covers: a sixth of the side or more."""
    dx, dy = DIRECTIONS[way]
    side = scene.width if dx else scene.height
    shape = replace(shape, radius=min(shape.radius, 0.3 * min(scene.width, scene.height)))
    room = side - 2 * shape.radius - 2
    length = rng.uniform(min(side / 6, room), room)
    start = shape.radius + 1 + rng.uniform(0, room - length)
    if dx + dy < 0:
        start = side - start
    return (replace(shape, x=start) if dx else replace(shape, y=start)), (dx * length, dy * length)


def _apart(shapes: tuple[Shape, ...]) -> bool:
    pairs = ((a, b) for i, a in enumerate(shapes) for b in shapes[:i])
    return all(math.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius + 2 for a, b in pairs)


def random_clip(rng: np.random.Generator, size: tuple[int, int] | None = None, length: int | None = None) -> Clip:
    """A clip of 4 to 16 frames with up to three shapes: one or two move straight along an axis, the others rest.

    Most clips are small, as frames of clips are shrunk anyway.
    """
    length = length or int(rng.integers(4, 17))
    fps = (None, 1.0, 2.0, 4.0, 8.0, 24.0, 30.0)[rng.integers(7)]
    while True:
        sides = size or random_size(rng, high=(140, 140, 168, MAX_SIDE)[rng.integers(4)])
        scene = random_scene(rng, int(rng.integers(1, 4)), sides)
        shapes, ways, paths = list(scene.shapes), {}, {}
        movers = 2 if len(shapes) > 1 and rng.random() < 0.4 else 1
        for index in rng.permutation(len(shapes))[:movers]:
            ways[int(index)] = list(DIRECTIONS)[rng.integers(4)]
            shapes[index], paths[int(index)] = _path(rng, shapes[index], ways[int(index)], scene)
        frames = []
        for i in range(length):
            now = list(shapes)
            for index, (dx, dy) in paths.items():
                shape, done = shapes[index], i / (length - 1)
                now[index] = replace(shape, x=shape.x + dx * done, y=shape.y + dy * done)
            frames.append(replace(scene, shapes=tuple(now)))
        if all(_apart(frame.shapes) for frame in frames):
            return Clip(tuple(frames), ways, fps)
