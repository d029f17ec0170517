"""Compares an outline with every shape of the little world, at every angle."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .world import SHAPES, local_coordinates

#: Radians after which a turned shape looks the same; those that never look different have none.
PERIODS = {"square": math.pi / 2, "triangle": 2 * math.pi / 3, "star": 2 * math.pi / 5, "cross": math.pi / 2}

_ANGLES = 12  # per period
_CANVAS = 32  # side of the picture on which outlines are compared
_EXTENT = 1.5  # half of that side, in radii of the disc of the same area


def likeness(inside: NDArray[np.bool_], x: float, y: float, radius: float) -> dict[str, tuple[float, float]]:
    """Overlap (intersection over union) with every shape of the same area and centre, at the best angle.

    Args:
        inside: `[H, W]`, the outline's pixels.
        x: its centre, in heights of the frame.
        y: likewise.
        radius: of the disc of the same area, likewise.

    Returns:
        By shape: the overlap in [0, 1], and the angle in radians.
    """
    height, width = inside.shape
    steps = (np.arange(_CANVAS) + 0.5) / _CANVAS * 2 - 1
    columns, rows = (np.floor((centre + steps * _EXTENT * radius) * height).astype(int) for centre in (x, y))
    within = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))
    seen = inside[np.ix_(rows.clip(0, height - 1), columns.clip(0, width - 1))] & within
    found = {}
    for name, (angles, masks) in _templates().items():
        overlap = (masks & seen).sum(axis=(1, 2)) / np.maximum((masks | seen).sum(axis=(1, 2)), 1)
        best = int(overlap.argmax())
        found[name] = (float(overlap[best]), angles[best])
    return found


@cache
def _templates() -> dict[str, tuple[list[float], NDArray[np.bool_]]]:
    """By shape: angles, and at each its outline of the unit disc's area, centred: `[angles, rows, columns]`."""
    steps = (((np.arange(_CANVAS) + 0.5) / _CANVAS * 2 - 1) * _EXTENT).astype(np.float32)
    y, x = np.meshgrid(steps, steps, indexing="ij")
    found = {}
    for name, distance in SHAPES.items():
        period = PERIODS.get(name)
        angles = [0.0] if period is None else [period * i / _ANGLES for i in range(_ANGLES)]
        area, centre_x, centre_y = _moments(name)
        radius = math.sqrt(math.pi / area)
        masks = []
        for angle in angles:
            u, v = local_coordinates(x, y, 0.0, 0.0, radius, angle)
            masks.append(distance(u + centre_x, v + centre_y) <= 0)
        found[name] = (angles, np.stack(masks))
    return found


def _moments(name: str) -> tuple[float, float, float]:
    """Area and centroid of the upright shape of radius 1."""
    steps = np.linspace(-1.5, 1.5, 601, dtype=np.float32)
    v, u = np.meshgrid(steps, steps, indexing="ij")
    inside = SHAPES[name](u, v) <= 0
    return float(inside.sum() * (steps[1] - steps[0]) ** 2), float(u[inside].mean()), float(v[inside].mean())
