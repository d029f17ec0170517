"""Sizes that a data set file gives as areas, aspect ratios and lengths, made into buckets."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import Section

from .buckets import Bucket


def _pair(value: Any) -> Any:
    """`512` or `"512"` (the sides of a square) or `"512x768"` (height x width) as a pair; pairs pass through."""
    if isinstance(value, str):
        value = [int(part) if part.isdigit() else part for part in value.split("x")]
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    return value * 2 if isinstance(value, list) and len(value) == 1 else value


Resolution = Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], BeforeValidator(_pair)]


class Sizes(Section):
    """Areas in pixels, cut at several aspect ratios and lengths."""

    resolutions: list[Resolution] = Field(default=[])
    frame_buckets: list[Annotated[int, Field(ge=1)]] = Field(default=[])
    min_ar: float = Field(0.5, gt=0)
    max_ar: float = Field(2.0, gt=0)
    num_ar_buckets: int = Field(7, ge=0)


def explicit_buckets(sizes: Sizes, geometry: Geometry) -> tuple[list[Bucket], list[tuple[int, int]], list[str]]:
    """Buckets for videos and for images, rounded down to what the model takes, and notes of what was rounded.

    A resolution is an area, cut at `num_ar_buckets` aspect ratios from `min_ar` to `max_ar` (width / height), evenly spaced
    as factors; with 0 it is cut as it stands.
    """
    notes: dict[str, None] = {}
    lengths: dict[int, None] = {}
    for frames in sizes.frame_buckets:
        legal = (frames - 1) // geometry.temporal * geometry.temporal + 1
        if legal != frames:
            notes[f"frame_buckets {frames} is cut at {legal} frames, as the model takes {geometry.temporal}*k+1"] = None
        lengths[legal] = None
    multiple = geometry.size_multiple
    shapes: dict[tuple[int, int], None] = {}
    for height, width in sizes.resolutions:
        for exact in _shapes(height, width, sizes):
            shape = tuple(max(int(side + 1e-6) // multiple * multiple, multiple) for side in exact)
            if not sizes.num_ar_buckets and shape != exact:
                notes[
                    f"resolution {height}x{width} is cut at {shape[0]}x{shape[1]}, as the model takes multiples of {multiple}"
                ] = None
            shapes[(shape[0], shape[1])] = None
    # A length of 1 is for images: no video becomes one, unless it is the only length.
    longer = [frames for frames in lengths if frames > 1] or list(lengths)
    return [(frames, *shape) for frames in longer for shape in shapes], list(shapes), list(notes)


def _shapes(height: int, width: int, sizes: Sizes) -> list[tuple[float, float]]:
    count = sizes.num_ar_buckets
    if not count:
        return [(height, width)]
    step = (sizes.max_ar / sizes.min_ar) ** (1 / (count - 1)) if count > 1 else 1.0
    ratios = [sizes.min_ar * step**number for number in range(count)]
    return [(math.sqrt(height * width / ratio), math.sqrt(height * width * ratio)) for ratio in ratios]
