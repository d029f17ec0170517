"""Reads a clip of the little world back from its pixels: colour, shape, motion, speed and look, by measurement alone.

No network and no caption is involved. Shapes are saturated and backgrounds are grey, so a pixel belongs to the shape
where its colour channels differ. Each frame gives a centre, an area and, by comparison with all shapes at all angles,
a shape and an angle; how these change over the frames is the motion.
"""

from __future__ import annotations

import colorsys
import math
import re
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .world import COLOURS, LOOKS, MOTIONS, SHAPES, SPEEDS, TRANSLATIONS, Array, Scene, coverage, local_coordinates

_CHROMA = 50  # difference between the largest and smallest colour channel, of 255
_EDGE = 0.45  # of the strongest difference: pixels covered less are not inside, dark stripes are
_SMALLEST, _LARGEST = 0.016, 0.8  # squares of the frame's height: less or more is no shape
_LIKENESS = 0.5  # least overlap with the best shape, on average, for a clip to show any
_ANGLES = 12  # per period of a shape
#: Radians after which a turned shape looks the same; those that never look different have none.
_PERIODS = {"square": math.pi / 2, "triangle": 2 * math.pi / 3, "star": 2 * math.pi / 5, "cross": math.pi / 2}
_CANVAS = 32  # side of the picture on which outlines are compared
_RADII = 1.5  # half of that side, in radii of a shape

# What counts as which motion: over the whole clip, in heights of the frame, logarithms of the radius, radians.
_MOVES = 0.12
_GROWS = 0.15
_SPINS = math.radians(22)
_SWINGS = 0.15
#: Light and dark within a shape (standard deviation over mean) from which it counts as striped, and the share of that
#: which stripes must explain.
_STRIPED, _UPRIGHT = 0.2, 0.6


@dataclass(frozen=True)
class Reading:
    """What a clip shows; None where nothing can be told."""

    colour: str | None
    shape: str | None
    motion: str | None
    look: str | None
    speed: float = 0.0  # heights of the frame from first to last frame


@dataclass(frozen=True)
class Wanted:
    """What a caption asks for; None where it does not say."""

    colour: str | None
    shape: str | None
    motion: str | None
    look: str | None


def read(clip: NDArray[np.uint8]) -> Reading:
    """Measure a clip `[T, H, W, 3]` uint8."""
    frames = [seen for seen in map(_frame, clip) if seen is not None]
    if len(frames) < max(2, len(clip) // 2):
        return Reading(None, None, None, None)
    likeness = {name: float(np.mean([f.likeness[name][0] for f in frames])) for name in SHAPES}
    shape = max(SHAPES, key=likeness.__getitem__)
    motion, speed = _motion(frames, shape)
    stripes = np.median([f.stripes for f in frames])
    return Reading(
        colour=_colour(np.concatenate([f.pixels for f in frames])),
        shape=shape if likeness[shape] > _LIKENESS else None,
        motion=motion,
        look="striped" if stripes > _STRIPED else "plain",
        speed=speed,
    )


def wanted(caption: str) -> Wanted:
    """What a caption asks for: the first word of each kind."""
    words = re.findall(r"[a-z]+", caption.lower())
    motions = [name for name, phrases in MOTIONS.items() if any(phrase in caption.lower() for phrase in phrases)]
    return Wanted(
        colour=next((w for w in words if w in COLOURS), None),
        shape=next((w for w in words if w in SHAPES), None),
        motion=motions[0] if motions else None,
        look=next((w for w in words if w in LOOKS), None),
    )


def wanted_speed(caption: str) -> str | None:
    """The adverb of a caption in which a shape moves to another place, "" if it has none; None for other motions."""
    if wanted(caption).motion not in TRANSLATIONS:
        return None
    return next((word for word in SPEEDS if word and word in caption.lower()), "")


def obeys(reading: Reading, want: Wanted | Scene) -> dict[str, bool]:
    """For each thing that is asked for, whether the clip shows it."""
    asked = {field.name: getattr(want, field.name) for field in fields(Wanted)}
    return {name: getattr(reading, name) == value for name, value in asked.items() if value is not None}


def speed_word(reading: Reading) -> str:
    """The adverb for a moving shape's speed: the nearest of the world's."""
    return min(SPEEDS, key=lambda word: abs(SPEEDS[word] - reading.speed))


# ---- one frame -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    x: float
    y: float
    radius: float  # of the disc of the same area
    pixels: NDArray[np.uint8]  # [N, 3], inside the shape
    likeness: dict[str, tuple[float, float]]  # by shape: overlap in [0, 1] at the best angle, and that angle
    stripes: float


def _frame(image: NDArray[np.uint8]) -> _Frame | None:
    height = image.shape[0]
    chroma = image.max(axis=2).astype(int) - image.min(axis=2)
    inside = chroma > max(_CHROMA, _EDGE * np.quantile(chroma, 0.99))
    area = inside.sum() / height**2
    if not _SMALLEST < area < _LARGEST:
        return None
    rows, columns = np.nonzero(inside)
    x, y = (columns.mean() + 0.5) / height, (rows.mean() + 0.5) / height
    radius = math.sqrt(area / math.pi)
    pixels = image[inside]
    return _Frame(x, y, radius, pixels, _likeness(inside, x, y, radius), _stripes(pixels, rows, columns))


def _likeness(inside: NDArray[np.bool_], x: float, y: float, radius: float) -> dict[str, tuple[float, float]]:
    """Overlap (intersection over union) of the outline with every shape of the same area and centre, at the best angle."""
    height, width = inside.shape
    steps = (np.arange(_CANVAS) + 0.5) / _CANVAS * 2 - 1
    columns, rows = (
        np.clip(((centre + steps * _RADII * radius) * height).astype(int), 0, most - 1)
        for centre, most in ((x, width), (y, height))
    )
    seen = inside[np.ix_(rows, columns)].ravel()
    found = {}
    for name, (angles, masks) in _templates().items():
        overlap = (masks & seen).sum(axis=1) / np.maximum((masks | seen).sum(axis=1), 1)
        best = int(overlap.argmax())
        found[name] = (float(overlap[best]), angles[best])
    return found


@cache
def _templates() -> dict[str, tuple[list[float], NDArray[np.bool_]]]:
    """By shape: angles, and its outline at each, of unit area radius, centred on its centroid: `[angles, pixels]`."""
    found = {}
    for name in SHAPES:
        period = _PERIODS.get(name)
        angles = [0.0] if period is None else [period * i / _ANGLES for i in range(_ANGLES)]
        area, centre_x, centre_y = _moments(name)
        radius = math.sqrt(math.pi / area)  # of the shape whose area is that of the unit disc
        steps = (((np.arange(_CANVAS) + 0.5) / _CANVAS * 2 - 1) * _RADII).astype(np.float32)
        y, x = np.meshgrid(steps, steps, indexing="ij")
        masks = []
        for angle in angles:
            u, v = local_coordinates(x, y, 0.0, 0.0, radius, angle)
            masks.append(coverage(name, u + centre_x, v + centre_y, pixels=1e3).ravel() > 0.5)
        found[name] = (angles, np.stack(masks))
    return found


def _moments(name: str) -> tuple[float, float, float]:
    """Area and centroid of the upright shape of radius 1."""
    steps = np.linspace(-1.5, 1.5, 601, dtype=np.float32)
    v, u = np.meshgrid(steps, steps, indexing="ij")
    inside = SHAPES[name](u, v) <= 0
    return float(inside.sum() * (steps[1] - steps[0]) ** 2), float(u[inside].mean()), float(v[inside].mean())


def _stripes(pixels: NDArray[np.uint8], rows: NDArray[np.intp], columns: NDArray[np.intp]) -> float:
    """How much brightness varies within a shape in straight stripes: standard deviation over mean, or 0 for others."""
    light = pixels.max(axis=1).astype(np.float64)
    spread = light.std() / max(light.mean(), 1.0)
    if spread < _STRIPED:
        return 0.0
    explained = max(_explained(light, columns * math.cos(a) + rows * math.sin(a)) for a in np.arange(12) * math.pi / 12)
    return float(spread) if explained > _UPRIGHT else 0.0


def _explained(light: Array, position: Array) -> float:
    """Share of the variance of brightness that lies between the lines across a direction."""
    line = (position - position.min()).astype(int)
    counts = np.maximum(np.bincount(line), 1)
    means = np.bincount(line, weights=light) / counts
    return float(((means[line] - light.mean()) ** 2).mean() / max(light.var(), 1e-9))


# ---- the whole clip ------------------------------------------------------------------------------------------------


def _colour(pixels: NDArray[np.uint8]) -> str:
    """The colour whose hue is nearest to the middle one of all pixels, pale edges left out."""
    chroma = pixels.max(axis=1).astype(int) - pixels.min(axis=1)
    strong = pixels[chroma >= np.median(chroma)]
    hue = _hue(np.median(strong, axis=0))
    return min(COLOURS, key=lambda name: abs((_hue(COLOURS[name]) - hue + 0.5) % 1 - 0.5))


def _hue(colour: object) -> float:
    red, green, blue = (float(c) / 255 for c in colour)  # type: ignore[attr-defined]
    return colorsys.rgb_to_hsv(red, green, blue)[0]


def _motion(frames: list[_Frame], shape: str) -> tuple[str, float]:
    """The motion, and how far the shape's centre gets."""
    x, y, size = (np.array([getattr(f, name) for f in frames]) for name in ("x", "y", "radius"))
    dx, dy, growth = _travel(x), _travel(y), _travel(np.log(size))
    swing = np.ptp(y - np.linspace(y[0], y[-1], len(y)))
    speed = math.hypot(dx, dy)
    if abs(dx) > _MOVES and swing > _SWINGS:
        return "zigzag", speed
    if speed > _MOVES:
        if abs(dx) > abs(dy):
            return ("right" if dx > 0 else "left"), speed
        return ("down" if dy > 0 else "up"), speed
    if abs(growth) > _GROWS:
        return ("growing" if growth > 0 else "shrinking"), speed
    period = _PERIODS.get(shape)
    if period is not None:
        angles = np.array([f.likeness[shape][1] for f in frames])
        if abs(_travel(np.unwrap(angles, period=period))) > _SPINS:
            return "rotating", speed
    return "still", speed


def _travel(values: Array) -> float:
    """Change from first to last frame of the straight line through all frames."""
    time = np.linspace(0, 1, len(values))
    return float(np.polyfit(time, values, 1)[0])
