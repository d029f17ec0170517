"""Template matching: compare a frame with every shape of the little world, at every angle and about its size."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .world import SHAPES, Array, coverage, local_coordinates

#: Radians after which a turned shape looks the same; shapes that never look different have none.
PERIODS = {"square": math.pi / 2, "triangle": 2 * math.pi / 3, "star": 2 * math.pi / 5, "cross": math.pi / 2}

_ANGLES = 12  # per period
_SIZES = (0.8, 0.87, 0.94, 1.0, 1.08)  # size is measured by area, which blur around a shape increases
_CANVAS = 32  # side of the image on which shapes are compared
_EXTENT = 1.6  # half of that side, in radii of the disc of the same area
_STEPS = ((np.arange(_CANVAS) + 0.5) / _CANVAS * 2 - 1) * _EXTENT  # places of its pixels along one side
_EDGE_PIXELS = 8.0  # radius in pixels at which a template's edge is as soft as that of a drawn shape


def likeness(covered: Array, x: float, y: float, radius: float) -> dict[str, tuple[float, float]]:
    """Return the overlap with every shape at the same center, at the best angle and size.

    Coverage is compared, not outlines, since a faint arm of a star is still an arm: the overlap is the sum of the
    smaller over the sum of the larger coverage of all pixels, the Jaccard index of fuzzy sets.

    Args:
        covered: `[H, W]` in [0, 1], share of each pixel that the shape covers.
        x, y: its center, in heights of the frame.
        radius: of the disc of the same area, in heights of the frame.

    Returns:
        By shape: the overlap in [0, 1], and the angle in radians.
    """
    canvas = _on_canvas(covered, x, y, radius).reshape(-1)
    overlaps = {}
    for name, (angles, templates) in _templates().items():
        overlap = np.minimum(templates, canvas).sum(axis=1) / np.maximum(templates, canvas).sum(axis=1)
        best = int(overlap.argmax())
        overlaps[name] = (float(overlap[best]), angles[best])
    return overlaps


def _on_canvas(covered: Array, x: float, y: float, radius: float) -> Array:
    """Return the square around a shape, resampled bilinearly; nothing is covered outside of the frame."""
    height = covered.shape[0]
    steps = _STEPS * radius
    padded = np.pad(covered, 1)  # so that the border fades into nothing
    columns, rows = ((center + steps) * height + 0.5 for center in (x, y))
    column, row = (
        np.floor(c).astype(int).clip(0, size - 2) for c, size in ((columns, padded.shape[1]), (rows, padded.shape[0]))
    )
    right, down = ((c - i).clip(0, 1) for c, i in ((columns, column), (rows, row)))
    upper = padded[np.ix_(row, column)] * (1 - right) + padded[np.ix_(row, column + 1)] * right
    lower = padded[np.ix_(row + 1, column)] * (1 - right) + padded[np.ix_(row + 1, column + 1)] * right
    return upper * (1 - down)[:, None] + lower * down[:, None]


@cache
def _templates() -> dict[str, tuple[list[float], NDArray[np.float32]]]:
    """Return angles and coverage by shape; there is a row for each angle and size, `[angles x sizes, pixels]`."""
    steps = _STEPS.astype(np.float32)
    y, x = np.meshgrid(steps, steps, indexing="ij")
    by_shape = {}
    for name in SHAPES:
        period = PERIODS.get(name)
        area, center_x, center_y = _moments(name)
        angles, templates = [], []
        for angle in [0.0] if period is None else [period * i / _ANGLES for i in range(_ANGLES)]:
            for size in _SIZES:
                radius = size * math.sqrt(math.pi / area)
                u, v = local_coordinates(x, y, 0.0, 0.0, radius, angle)
                templates.append(coverage(name, u + center_x, v + center_y, pixels=radius * _EDGE_PIXELS).reshape(-1))
                angles.append(angle)
        by_shape[name] = (angles, np.stack(templates))
    return by_shape


def _moments(name: str) -> tuple[float, float, float]:
    """Return area and centroid of the upright shape of radius 1."""
    steps = np.linspace(-1.5, 1.5, 601, dtype=np.float32)
    v, u = np.meshgrid(steps, steps, indexing="ij")
    inside = SHAPES[name](u, v) <= 0
    return float(inside.sum() * (steps[1] - steps[0]) ** 2), float(u[inside].mean()), float(v[inside].mean())
