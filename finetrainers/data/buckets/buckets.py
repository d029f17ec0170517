"""Buckets, the sizes that clips are cut to: pure functions over `(frames, height, width)` buckets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import EpochEnd

Bucket = tuple[int, int, int]

#: Areas above this share of another one count as the same resolution: rounding makes them differ.
_SAME_AREA = 0.8
_DEFAULT_MAX_FRAMES = 49
_DEFAULT_MAX_AREA = 512 * 768


def choose_bucket(frames: int, height: int, width: int, buckets: Sequence[Bucket]) -> Bucket | None:
    """Return the bucket of a clip with `frames` usable frames; None when it is too short for every bucket.

    The longest buckets that the clip fills come first; among them the one of nearest aspect ratio (as a factor, so
    that 2:1 and 1:2 are equally far from 1:1), and among equals the larger one.
    """
    fitting = [bucket for bucket in buckets if bucket[0] <= frames]
    if not fitting:
        return None
    longest = max(bucket[0] for bucket in fitting)
    ratio = math.log(width / height)

    def order(bucket: Bucket) -> tuple[float, int, Bucket]:
        # Rounded, so that 256x256 and 512x512 really tie.
        return round(abs(math.log(bucket[2] / bucket[1]) - ratio), 9), -bucket[1] * bucket[2], bucket

    return min((bucket for bucket in fitting if bucket[0] == longest), key=order)


def default_buckets(clips: Sequence[Bucket], geometry: Geometry, lengths: Sequence[int] = ()) -> list[Bucket]:
    """Buckets for a user who named no size, from the usable frames, height and width of each clip.

    The size is the median height and width, shrunk to at most 512x768 pixels of area and rounded down to what the
    model accepts. Lengths are those given, or `default_lengths`.
    """
    height = statistics.median(clip[1] for clip in clips)
    width = statistics.median(clip[2] for clip in clips)
    shrink = min(1.0, math.sqrt(_DEFAULT_MAX_AREA / (height * width)))
    sides = geometry.fitted(height * shrink, width * shrink)
    chosen = lengths or default_lengths([clip[0] for clip in clips], geometry)
    return [(frames, *sides) for frames in chosen]


def default_lengths(frames: Sequence[int], geometry: Geometry) -> list[int]:
    """Return the largest legal lengths not above the median clip (49 at most) and not above the shortest, longest first.

    So every clip fits somewhere.
    """
    wanted = {min(int(statistics.median(frames)), _DEFAULT_MAX_FRAMES), min(*frames, _DEFAULT_MAX_FRAMES)}
    return sorted({legal_length(one, geometry) for one in wanted}, reverse=True)


def legal_lengths(wanted: Sequence[int], geometry: Geometry) -> tuple[list[int], list[str]]:
    """Lengths rounded down to what the model accepts, longest first, and a note on each that was rounded.

    Raises:
        ValueError: a video's length that would become a single frame.
    """
    found: dict[int, None] = {}
    notes = []
    for length in wanted:
        legal = legal_length(length, geometry)
        if legal == 1 < length:
            raise ValueError(
                f"{length} frames: this model takes {geometry.temporal}*k+1, and below are only images; "
                f"use {geometry.temporal + 1}, or 1 for images"
            )
        if legal != length:
            notes.append(f"{length} frames is not {geometry.temporal}*k+1; cut to {legal}")
        found[legal] = None
    return sorted(found, reverse=True), notes


def area_sizes(
    resolution: tuple[int, int], geometry: Geometry, *, count: int, min_ar: float, max_ar: float
) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the sizes `(height, width)` of one area, tallest first and all different, and what was rounded down.

    The aspect ratios r = width / height lie evenly spaced in log r, ends included (one alone lies in the middle). For
    an area A, the height is sqrt(A / r) and the width sqrt(A * r), each rounded to the nearest multiple that the model
    accepts.

    Args:
        resolution: height and width of a picture of that area.
        geometry: of the model.
        count: how many aspect ratios; 0: only the resolution's own shape, rounded down.
        min_ar, max_ar: narrowest and widest.

    Raises:
        ValueError: a side is smaller than the model accepts.
    """
    multiple = geometry.size_multiple
    height, width = resolution
    name = f"{height}x{width}"
    if count == 0:
        rounded = height // multiple * multiple, width // multiple * multiple
        if 0 in rounded:
            raise ValueError(
                f"{name}: sides are multiples of {multiple} in this model; use at least {multiple}x{multiple}"
            )
        note = f"{name} is not of multiples of {multiple}; cut to {rounded[0]}x{rounded[1]}"
        return [rounded], [note] if rounded != resolution else []
    low, high = math.log(min_ar), math.log(max_ar)
    logs = [low + (high - low) * k / (count - 1) for k in range(count)] if count > 1 else [(low + high) / 2]
    sizes: dict[tuple[int, int], None] = {}
    for log_ratio in logs:
        scale = math.exp(log_ratio / 2)
        side = math.sqrt(height * width)
        size = round(side / scale / multiple) * multiple, round(side * scale / multiple) * multiple
        if 0 in size:
            raise ValueError(
                f"{name}: at the aspect ratio {math.exp(log_ratio):.3g} a side is below {multiple} pixels, the least that this "
                "model takes; use a larger resolution, or aspect ratios nearer to 1"
            )
        sizes[size] = None
    return list(sizes), []


def filled_resolution(height: int, width: int, resolutions: Sequence[Sequence[Bucket]]) -> Sequence[Bucket]:
    """Return the buckets of the largest resolution that a clip of this size fills; those of the smallest if it fills none.

    Args:
        height, width: of the clip.
        resolutions: the buckets of each, largest area first.
    """
    for buckets in resolutions:
        if height * width >= _SAME_AREA * max(map(_area, buckets)):
            return buckets
    return resolutions[-1]


def lower_buckets(
    bucket: Bucket, height: int, width: int, buckets: Sequence[Bucket], *, shorter: bool = False
) -> list[Bucket]:
    """Return the lower buckets that a clip of this size falls through to, in order.

    To the next lower resolution of the same length, there to the nearest aspect ratio, and so on.

    Args:
        bucket: of the clip.
        height, width: of the clip.
        buckets: all there are.
        shorter: whether the next shorter lengths follow, from its highest resolution. Videos never become images.
    """
    lengths = [bucket[0]]
    if shorter:
        lengths += sorted({one[0] for one in buckets if 1 < one[0] < bucket[0]}, reverse=True)
    found: list[Bucket] = []
    limit = _SAME_AREA * _area(bucket)
    for length in lengths:
        while below := [one for one in buckets if one[0] == length and _area(one) <= limit]:
            top = max(map(_area, below))
            alike = [one for one in below if _area(one) > _SAME_AREA * top]
            chosen = choose_bucket(length, height, width, alike)
            assert chosen is not None, "a bucket of this length is there"
            found.append(chosen)
            limit = _SAME_AREA * _area(chosen)
        limit = math.inf
    return found


def bucket_probabilities(buckets: Sequence[Bucket], keep: Mapping[Bucket, float]) -> list[float]:
    """Return the probabilities that a clip ends in each of the buckets that it may fall through, in order.

    What they lack to 1 is left out.
    """
    found = []
    rest = 1.0
    for bucket in buckets:
        share = keep.get(bucket, 1.0)
        found.append(rest * share)
        rest *= 1.0 - share
    return found


def num_batches(count: float, size: int, epoch_end: EpochEnd) -> int:
    """Return the number of batches of a bucket in an epoch; for `wrap`, without clips carried over from the epoch before."""
    return math.ceil(count / size) if epoch_end in ("keep", "pad") else math.floor(count / size)


def nearest_bucket(bucket: Bucket, buckets: Sequence[Bucket]) -> Bucket:
    """Return the bucket whose length, height and width differ least, as factors."""
    return min(buckets, key=lambda one: (sum(abs(math.log(a / b)) for a, b in zip(one, bucket, strict=True)), one))


def cover_size(height: int, width: int, bucket_height: int, bucket_width: int) -> tuple[int, int]:
    """Return the smallest `(height, width)` of a clip's own aspect ratio that covers a bucket."""
    scale = max(bucket_height / height, bucket_width / width)
    return max(round(height * scale), bucket_height), max(round(width * scale), bucket_width)


@lru_cache
def bucket_text(bucket: Bucket) -> str:
    """Return the bucket as `FxHxW`."""
    return "x".join(map(str, bucket))


def _area(bucket: Bucket) -> int:
    return bucket[1] * bucket[2]


def legal_length(frames: int, geometry: Geometry) -> int:
    """Return the largest length that the model accepts, not above a number of frames."""
    return (frames - 1) // geometry.temporal * geometry.temporal + 1
