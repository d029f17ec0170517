"""A little world of captioned clips: one colored shape that moves over a grey background, drawn from a seed.

Everything a caption says can be read back from the pixels (`verify.py`), so prompt adherence is measured instead of
guessed. Lengths are in units of the frame's height, times run from 0 (first frame) to 1 (last frame).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetrainers.utils.seeding import generator

Array = NDArray[np.floating[Any]]
Pixels = NDArray[np.uint8]

#: Saturated colors, far apart in hue; backgrounds are grey, so that the two are never mistaken for each other.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (228, 36, 36),
    "orange": (246, 140, 20),
    "yellow": (238, 222, 30),
    "green": (40, 176, 60),
    "cyan": (36, 208, 218),
    "blue": (36, 72, 232),
    "purple": (140, 44, 204),
    "pink": (250, 70, 170),
}
MOTIONS: dict[str, tuple[str, ...]] = {
    "left": ("moving left", "that moves to the left"),
    "right": ("moving right", "that moves to the right"),
    "up": ("moving up", "that moves upwards"),
    "down": ("moving down", "that moves downwards"),
    "rotating": ("rotating", "that spins"),
    "growing": ("growing", "that gets bigger"),
    "shrinking": ("shrinking", "that gets smaller"),
    "still": ("standing still", "that does not move"),
    "zigzag": ("moving in a zigzag", "that goes zigzag"),
}
SPEEDS: dict[str, float] = {"slowly": 0.25, "": 0.5, "quickly": 1.0}  # distance over the whole clip
#: Width over height of a frame.
ASPECT = 2
#: Grey levels.
BACKGROUNDS = {"black": 10, "grey": 128, "white": 242}
LOOKS = ("plain", "striped")

#: Motions that the demo model has never seen, like every look but the plain one, so that users can teach them.
UNSEEN_MOTIONS = ("zigzag",)
#: A word that means nothing to the demo model, and the meaning to teach.
NEW_WORD, MEANING = "tiger", "striped orange"

TRANSLATIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
_ROUND = ("circle", "ring")  # turning them shows nothing
_RADIUS = 0.25
#: Shapes pass the middle of a clip on a lattice of this pitch.
_PITCH = 0.25
_GROWTH = 1.8  # last radius over first
_SPIN = math.radians(64)  # less than the smallest period of a shape, the star's 72 degrees
_ZIGZAG_HEIGHT = 0.2
_STRIPE = 0.4  # width of a stripe, in radii
_STRIPE_SHADE = 0.5
_TEMPLATES = (
    "{a} {color} {shape} {motion} on a {background} background",
    "{background} background, {a} {color} {shape} {motion}",
    "a video of {a} {color} {shape} {motion} over a {background} background",
    "{color} {shape} {motion}, {background} background",
)


@dataclass(frozen=True)
class Scene:
    """The content of a clip, and its placement, which captions do not mention: all that its pixels depend on."""

    color: str
    shape: str
    motion: str
    background: str
    speed: str = ""
    look: str = "plain"
    x: float = 0.5 * ASPECT  # center in the middle of the clip
    y: float = 0.5
    radius: float = _RADIUS


def draw_scene(
    *seed: int | str,
    held_out: bool | None = False,
    motions: tuple[str, ...] | None = None,
    colors: tuple[str, ...] = tuple(COLORS),
    look: str = "plain",
) -> Scene:
    """Draw a random scene, the same for the same seed.

    Args:
        seed: integers and names.
        held_out: True for combinations of color, shape and motion that the training set lacks, False for others, None
            for any.
        motions: to choose from; default: all but the unseen ones.
        colors: to choose from.
        look: of the shape.
    """
    rng = generator("cpu", "world", *seed)
    motions = motions or tuple(m for m in MOTIONS if m not in UNSEEN_MOTIONS)
    while True:
        scene = Scene(
            color=_choose(rng, colors),
            shape=_choose(rng, tuple(SHAPES)),
            motion=_choose(rng, motions),
            background=_choose(rng, tuple(BACKGROUNDS)),
            look=look,
        )
        if scene.motion == "rotating" and scene.shape in _ROUND:
            continue
        if held_out is None or is_held_out(scene) == held_out:
            break
    if scene.motion in TRANSLATIONS:
        # A frame is twice as wide as high, and a quick shape would leave it at the top.
        speeds = tuple(SPEEDS) if scene.motion in ("left", "right") else ("slowly", "")
        scene = replace(scene, speed=_choose(rng, speeds))
    reach_x, reach_y = _reach(scene)
    return replace(scene, x=_place(rng, ASPECT / 2, reach_x), y=_place(rng, 0.5, reach_y))


def is_held_out(scene: Scene) -> bool:
    """Return whether the training set lacks this combination of color, shape and motion, which is one in eight."""
    color, shape = list(COLORS).index(scene.color), list(SHAPES).index(scene.shape)
    return (color + 3 * shape + 5 * list(MOTIONS).index(scene.motion)) % 8 == 0


def caption(scene: Scene, *, phrasing: int = 0, color: str | None = None) -> str:
    """Return a caption of a scene in one of `PHRASINGS` phrasings; `color` replaces the scene's own."""
    words = MOTIONS[scene.motion]
    motion = words[phrasing % len(words)]
    if scene.speed:
        motion = f"{motion} {scene.speed}"
    color = color or scene.color
    color = color if scene.look == "plain" else f"{scene.look} {color}"
    template = _TEMPLATES[phrasing // len(words) % len(_TEMPLATES)]
    article = "an" if color[0] in "aeiou" else "a"
    return template.format(a=article, color=color, shape=scene.shape, motion=motion, background=scene.background)


PHRASINGS = 2 * len(_TEMPLATES)


def with_new_word(caption: str) -> str:
    """Return a caption with the new word instead of its meaning."""
    return caption.replace(MEANING, NEW_WORD)


def render(scene: Scene, *, frames: int = 9, height: int = 32) -> Pixels:
    """Render a clip, antialiased: `[T, H, 2 H, 3]` uint8."""
    steps = (np.arange(ASPECT * height, dtype=np.float32) + 0.5) / height
    y, x = np.meshgrid(steps[:height], steps, indexing="ij")
    background = np.full((height, ASPECT * height, 3), BACKGROUNDS[scene.background], dtype=np.float32)
    ink = np.asarray(COLORS[scene.color], dtype=np.float32)
    clip = np.empty((frames, *background.shape), dtype=np.uint8)
    for i in range(frames):
        center_x, center_y, radius, angle = pose(scene, i / max(frames - 1, 1))
        u, v = local_coordinates(x, y, center_x, center_y, radius, angle)
        covered = coverage(scene.shape, u, v, pixels=radius * height)[..., None]
        color = ink * _stripes(u, pixels=radius * height)[..., None] if scene.look == "striped" else ink
        clip[i] = (background + covered * (color - background)).round().clip(0, 255)
    return clip


def pose(scene: Scene, time: float) -> tuple[float, float, float, float]:
    """Return center (x, y), radius and angle in radians at a time in [0, 1]."""
    x, y, radius, angle = scene.x, scene.y, scene.radius, 0.0
    middle = time - 0.5
    if scene.motion in TRANSLATIONS:
        dx, dy = TRANSLATIONS[scene.motion]
        x += dx * SPEEDS[scene.speed] * middle
        y += dy * SPEEDS[scene.speed] * middle
    elif scene.motion == "rotating":
        angle = _SPIN * time
    elif scene.motion == "growing":
        radius *= _GROWTH**middle
    elif scene.motion == "shrinking":
        radius *= _GROWTH**-middle
    elif scene.motion == "zigzag":
        x += SPEEDS[""] * middle
        y += _ZIGZAG_HEIGHT * (2 * abs((2 * time) % 1 - 0.5) * 2 - 1)  # a triangle wave of two periods
    return x, y, radius, angle


def local_coordinates(
    x: Array, y: Array, center_x: float, center_y: float, radius: float, angle: float
) -> tuple[Array, Array]:
    """Return coordinates in which the shape stands upright at the origin with radius 1."""
    u, v = (x - center_x) / radius, (y - center_y) / radius
    cos, sin = math.cos(angle), math.sin(angle)
    return cos * u + sin * v, cos * v - sin * u


def coverage(shape: str, u: Array, v: Array, *, pixels: float) -> Array:
    """Return the share of each pixel that the shape covers; one unit of `u` and `v` is `pixels` pixels."""
    return np.clip(0.5 - SHAPES[shape](u, v) * pixels, 0.0, 1.0)


# ---- shapes: signed distance to the outline, negative inside, in radii ----------------------------------------------


def _cross(u: Array, v: Array) -> Array:
    wide, narrow = np.maximum(np.abs(u), np.abs(v)), np.minimum(np.abs(u), np.abs(v))
    return np.maximum(wide - 1.0, narrow - 0.3)


def _star(u: Array, v: Array) -> Array:
    """Return the distance to a star of five points, by folding the plane into one tenth.

    There the outline is the line from a tip to a notch.
    """
    tip, notch = 1.15, 0.5
    angle = np.arctan2(u, -v)
    folded = np.abs((angle + math.pi / 5) % (2 * math.pi / 5) - math.pi / 5)
    length = np.hypot(u, v)
    a, b = length * np.cos(folded), length * np.sin(folded)
    end_a, end_b = notch * math.cos(math.pi / 5), notch * math.sin(math.pi / 5)
    normal_a, normal_b = end_b, tip - end_a
    return ((a - tip) * normal_a + b * normal_b) / math.hypot(normal_a, normal_b)


SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda u, v: np.hypot(u, v) - 0.95,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) - 0.85,
    "triangle": lambda u, v: np.maximum(np.abs(u) * (math.sqrt(3) / 2) - v * 0.5, v) - 0.58,
    "star": _star,
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.78) - 0.24,
    "cross": _cross,
}


# ---- paint ---------------------------------------------------------------------------------------------------------


def _stripes(u: Array, *, pixels: float) -> Array:
    """Return the brightness across the shape: upright stripes, light and dark, antialiased."""
    distance = (np.abs((u / _STRIPE) % 2 - 1) - 0.5) * _STRIPE
    light = np.clip(0.5 + distance * pixels, 0.0, 1.0)
    return _STRIPE_SHADE + (1 - _STRIPE_SHADE) * light


def _reach(scene: Scene) -> tuple[float, float]:
    """Return the distance that the shape gets from its place in mid-clip, horizontally and vertically."""
    radius = scene.radius * (math.sqrt(_GROWTH) if scene.motion in ("growing", "shrinking") else 1.0)
    if scene.motion == "zigzag":
        return radius + SPEEDS[""] / 2, radius + _ZIGZAG_HEIGHT
    dx, dy = TRANSLATIONS.get(scene.motion, (0.0, 0.0))
    moves = SPEEDS[scene.speed] / 2
    return radius + abs(dx) * moves, radius + abs(dy) * moves


def _choose(rng: torch.Generator, names: tuple[str, ...]) -> str:
    return names[int(torch.randint(len(names), (), generator=rng, device="cpu"))]


def _place(rng: torch.Generator, middle: float, reach: float) -> float:
    """Draw a lattice point that keeps a shape of this reach within the frame, or nearly so."""
    steps = int((middle - reach + 0.02) / _PITCH)
    return middle + _PITCH * int(torch.randint(-steps, steps + 1, (), generator=rng, device="cpu"))
