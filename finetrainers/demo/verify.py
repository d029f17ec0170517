"""Recognize the content of a clip of the little world from its pixels: color, shape, motion, speed, look, background.

No network is involved. Shapes are saturated and backgrounds are grey, so a pixel belongs to the shape where its color
channels differ. Each frame gives a place, a size and, by comparison with all shapes at all angles, a shape and an
angle; their change over the frames is the motion. Content that is unclear or changes within a clip reads as None, so
that a clip cannot match by being several things at once.
"""

from __future__ import annotations

import colorsys
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .shape_matching import PERIODS, likeness
from .world import BACKGROUNDS, COLORS, LOOKS, MEANING, MOTIONS, NEW_WORD, SHAPES, SPEEDS, TRANSLATIONS, Array, Pixels

_CHROMA = 50  # least difference between the largest and smallest color channel inside a shape, of 255
_EDGE = 0.45  # of the strongest difference: pixels covered less are not inside, dark stripes are
_SMALLEST, _LARGEST = 0.016, 0.8  # squares of the frame's height: a smaller or larger area is not a shape
_LIKENESS = 0.5  # least overlap with the best shape, on average, for a clip to show any
_TIE = 0.02  # overlaps that differ by less count as equal: one more angle or size would change them as much
_COLOR_DISTANCE = 130  # between a pixel and the nearest color, of 441
_GREY_SPREAD = 25  # mean distance from the middle grey level above which a background is none of the world's
_AGREE = 0.75  # share of the frames that must agree

# Limits of each motion: over the whole clip, in heights of the frame, logarithms of the radius, radians.
_MOVES = 0.12
_RESTS = 0.15  # greatest span of the places of a shape that stays in place
_GROWS, _KEEPS = 0.15, 0.25  # the latter: greatest span of the sizes of one that stands still
_SPINS = math.radians(22)
_SWINGS = 0.15
_STRAIGHT = 0.08  # greatest mean distance from even motion; for sizes and angles: twice that
#: Contrast within a shape (standard deviation over mean) that counts as striped, the share of it that stripes must
#: explain, and the number of changes between light and dark, at least.
_STRIPED, _EXPLAINED, _CHANGES = 0.1, 0.5, 2


@dataclass(frozen=True)
class Reading:
    """The recognized content of a clip; None where it is unclear.

    `speed` is the distance from first to last frame, in heights of the frame.
    """

    color: str | None = None
    shape: str | None = None
    motion: str | None = None
    background: str | None = None
    look: str | None = None
    speed: float = 0.0


def read(clip: Pixels) -> Reading:
    """Measure a clip `[T, H, W, 3]` uint8."""
    background = _agreed([_background(image) for image in clip])
    frames = [
        frame for index, image in enumerate(clip) if (frame := _frame(image, index / (len(clip) - 1))) is not None
    ]
    if len(frames) < max(2, len(clip) - 1):
        return Reading(background=background)
    shape = _shape(frames)
    motion, speed = _motion(frames, shape)
    return Reading(
        color=_agreed([f.color for f in frames]),
        shape=shape,
        motion=motion,
        background=background,
        look="striped" if np.mean([f.striped for f in frames]) >= 0.5 else "plain",
        speed=speed,
    )


def requested_attributes(caption: str) -> dict[str, str]:
    """Return the attributes that a caption requests, the first word of each kind; a shape is plain by default."""
    text = caption.lower().replace(NEW_WORD, MEANING)
    words = re.findall(r"[a-z]+", text)
    color, shape, look = (next((word for word in words if word in names), None) for names in (COLORS, SHAPES, LOOKS))
    background = re.search(rf"({'|'.join(BACKGROUNDS)}) background", text)
    attributes = {
        "color": color,
        "shape": shape,
        "motion": next((name for name, phrases in MOTIONS.items() if any(phrase in text for phrase in phrases)), None),
        "background": background[1] if background else None,
        "look": look or (None if shape is None else "plain"),
    }
    return {name: word for name, word in attributes.items() if word is not None}


def requested_speed(caption: str) -> str | None:
    """Return the adverb of a caption whose shape moves to another place, or "" without one; None for other motions."""
    if requested_attributes(caption).get("motion") not in TRANSLATIONS:
        return None
    return next((word for word in SPEEDS if word and word in caption.lower()), "")


def matches(reading: Reading, caption: str) -> dict[str, bool]:
    """Return whether the clip shows each attribute that a caption requests, except speed."""
    return {name: getattr(reading, name) == word for name, word in requested_attributes(caption).items()}


def speed_word(reading: Reading) -> str | None:
    """Return the world's nearest adverb for the speed of a shape that moves to another place, or None for others."""
    if reading.motion not in TRANSLATIONS:
        return None
    return min(SPEEDS, key=lambda word: abs(SPEEDS[word] - reading.speed))


def has_speed(reading: Reading, caption: str) -> bool | None:
    """Return whether a shape has the requested motion and nearest speed, or None if the caption requests no speed."""
    speed = requested_speed(caption)
    return None if speed is None else matches(reading, caption)["motion"] and speed_word(reading) == speed


def share_shown(reading: Reading, caption: str) -> float:
    """Return the share of the caption's attributes that a clip shows, in [0, 1].

    Raises:
        ValueError: the caption names no attribute that can be read.
    """
    hits = matches(reading, caption)
    if not hits:
        raise ValueError(f"the prompt {caption!r} names no color, shape, motion, background or look of the demo world")
    return sum(hits.values()) / len(hits)


def reward(clip: Pixels, caption: str) -> float:
    """Return `share_shown` of a clip `[T, H, W, 3]` uint8."""
    return share_shown(read(clip), caption)


# ---- one frame -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    time: float
    x: float
    y: float
    radius: float  # of the disc of the same area
    color: str | None
    striped: bool
    likeness: dict[str, tuple[float, float]]  # by shape: overlap in [0, 1] at the best angle, and that angle


def chroma(image: Pixels) -> NDArray[np.int64]:
    """Return the colorfulness of pixels `[..., 3]`, the largest less the smallest channel, `[...]`."""
    return image.max(axis=-1).astype(np.int64) - image.min(axis=-1)


def _frame(image: Pixels, time: float) -> _Frame | None:
    height = image.shape[0]
    spread = chroma(image)
    strongest = np.quantile(spread, 0.99)
    inside = spread > max(_CHROMA, _EDGE * strongest)
    area = inside.sum() / height**2
    if not _SMALLEST < area < _LARGEST:
        return None
    rows, columns = np.nonzero(inside)
    x, y = (columns.mean() + 0.5) / height, (rows.mean() + 0.5) / height
    radius = math.sqrt(area / math.pi)
    pixels = image[inside]
    covered = (spread / max(strongest, 1.0)).clip(0, 1).astype(np.float32)
    return _Frame(time, x, y, radius, _color(pixels), _striped(image, inside), likeness(covered, x, y, radius))


def _color(pixels: Pixels) -> str | None:
    """Return the color whose hue is nearest to the median of the pixels without pale edges, or None if none is near."""
    spread = chroma(pixels)
    middle = np.median(pixels[spread >= np.median(spread)], axis=0)
    name = min(COLORS, key=lambda name: abs((_hue(COLORS[name]) - _hue(middle) + 0.5) % 1 - 0.5))
    return name if np.linalg.norm(middle - COLORS[name]) < _COLOR_DISTANCE else None


def _hue(color: Sequence[float] | NDArray[np.float64]) -> float:
    red, green, blue = (float(c) / 255 for c in color)
    return colorsys.rgb_to_hsv(red, green, blue)[0]


def _background(image: Pixels) -> str | None:
    """Return the background with the grey nearest to the median of the colorless pixels, or None if they are uneven."""
    grey = image[chroma(image) < _CHROMA].mean(axis=-1)
    if grey.size < image.shape[0] * image.shape[1] / 4:
        return None
    middle = float(np.median(grey))
    if np.abs(grey - middle).mean() > _GREY_SPREAD:
        return None
    return min(BACKGROUNDS, key=lambda name: abs(BACKGROUNDS[name] - middle))


def _striped(image: Pixels, inside: NDArray[np.bool_]) -> bool:
    """Return whether brightness within a shape, a pixel from its edge, changes in straight stripes."""
    padded = np.pad(inside, 1)
    rows, columns = np.nonzero(padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:] & inside)
    light = image[rows, columns].max(axis=1, initial=0).astype(np.float64)
    if light.size < 2 or light.std() < _STRIPED * max(light.mean(), 1.0):
        return False
    best, changes = max(
        _across(light, columns * math.cos(angle) + rows * math.sin(angle)) for angle in np.arange(12) * math.pi / 12
    )
    return best > _EXPLAINED and changes >= _CHANGES


def _across(light: Array, position: Array) -> tuple[float, int]:
    """Return the share of the variance of brightness between lines across a direction, and its number of changes."""
    line = np.round(position - position.min()).astype(int)
    counts = np.bincount(line)
    means = np.bincount(line, weights=light)[counts > 0] / counts[counts > 0]
    spread = np.repeat(means, counts[counts > 0]) - light.mean()
    explained = float((spread**2).mean() / max(light.var(), 1e-9))
    levels = np.sign(means - light.mean())[np.abs(means - light.mean()) > 0.3 * light.std()]
    return explained, int((levels[1:] != levels[:-1]).sum())


# ---- the whole clip ------------------------------------------------------------------------------------------------


def _agreed(values: Sequence[str | None]) -> str | None:
    """Return the most frequent value of the frames, or None if too few agree."""
    (value, count), *_ = Counter(values).most_common(1)
    return value if count >= _AGREE * len(values) else None


def _shape(frames: Sequence[_Frame]) -> str | None:
    """Return the most alike shape of all frames, or None if likeness is low or others are more alike in most frames."""
    overlap = {name: float(np.mean([f.likeness[name][0] for f in frames])) for name in SHAPES}
    shape = max(overlap, key=overlap.__getitem__)
    others = [max(value for name, (value, _) in f.likeness.items() if name != shape) for f in frames]
    wins = sum(f.likeness[shape][0] > other - _TIE for f, other in zip(frames, others, strict=True))
    return shape if overlap[shape] > _LIKENESS and wins > len(frames) / 2 else None


def _motion(frames: Sequence[_Frame], shape: str | None) -> tuple[str | None, float]:
    """Return the motion, or None if the world has no such motion, and the distance that the shape's center moves."""
    time = np.array([f.time for f in frames])
    x, y = np.array([f.x for f in frames]), np.array([f.y for f in frames])
    size = np.log([f.radius for f in frames])
    (dx, bent_x), (dy, bent_y), (growth, bent_size) = (_line(time, values) for values in (x, y, size))
    speed = math.hypot(dx, dy)
    if abs(dx) > 2 * _MOVES and _swings(y) >= 2 and bent_x < _STRAIGHT:
        return "zigzag", speed
    if speed > _MOVES:
        if max(bent_x, bent_y) > _STRAIGHT or min(abs(dx), abs(dy)) > max(abs(dx), abs(dy)) / 2:
            return None, speed
        if abs(dx) > abs(dy):
            return ("right" if dx > 0 else "left"), speed
        return ("down" if dy > 0 else "up"), speed
    if max(np.ptp(x), np.ptp(y)) > _RESTS or bent_size > 2 * _STRAIGHT:
        return None, speed
    if abs(growth) > _GROWS:
        return ("growing" if growth > 0 else "shrinking"), speed
    if shape in PERIODS:
        angles = np.unwrap([f.likeness[shape][1] for f in frames], period=PERIODS[shape])
        spin, bent_angle = _line(time, angles)
        if abs(spin) > _SPINS:
            return ("rotating" if bent_angle < 2 * _STRAIGHT else None), speed
    return ("still" if np.ptp(size) < _KEEPS else None), speed


def _line(time: Array, values: Array) -> tuple[float, float]:
    """Return the change over the clip of the straight line through the values, and their mean distance from it."""
    slope, start = np.polyfit(time, values, 1)
    return float(slope), float(np.abs(values - start - slope * time).mean())


def _swings(values: Array) -> int:
    """Return the number of times that a curve turns back by more than a little."""
    turns, extreme, direction = 0, values[0], 0.0
    for value in values[1:]:
        if direction * (value - extreme) >= 0 and direction:
            extreme = value
        elif abs(value - extreme) > _SWINGS / 2:
            turns += direction != 0
            direction, extreme = np.sign(value - extreme), value
    return int(turns)
