"""Buckets, the sizes that clips are cut to: pure functions over `(frames, height, width)` buckets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import EpochEnd

Bucket = tuple[int, int, int]

#: Areas above this share of another area count as the same resolution: rounding makes them differ.
_SAME_AREA = 0.8
#: Frames, height and width of clips that get the largest bucket where sizes are chosen from clips.
LARGEST_CHOSEN: Bucket = (49, 512, 768)
#: Aspect ratios within a factor of two that get separate sizes where sizes are chosen from clips.
_RATIOS_PER_OCTAVE = 3
#: Share of its frames that a clip uses at least where lengths are chosen from clips.
_LEAST_USED = 2 / 3


def sample_size(counts: Mapping[Bucket, int], *, has_chosen_buckets: bool) -> Bucket:
    """Return the size of samples: the training bucket with most pixels or, if buckets were chosen, with most clips.

    Among buckets of equally many clips it is the larger one, and among those of equal size the first.

    Args:
        counts: the number of clips in each bucket.
        has_chosen_buckets: whether the run has chosen the buckets from its clips.
    """
    return max(counts, key=lambda bucket: (counts[bucket] if has_chosen_buckets else 0, math.prod(bucket)))


def choose_bucket(frames: int, height: int, width: int, buckets: Sequence[Bucket]) -> Bucket | None:
    """Return the bucket of a clip with `frames` usable frames, or None if it is too short for every bucket.

    It is one of the longest buckets that the clip fills. Among these it has the nearest aspect ratio (as a factor, so
    that 2:1 and 1:2 are equally far from 1:1), and among equals the largest area.
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
    """Return the buckets of clips where no size is configured, from the usable frames, height and width of each.

    Clips of similar aspect ratios share a size: their median height and width, shrunk to an area of at most 512x768
    pixels and rounded down to a size that the model accepts. Lengths are `lengths`, or else `default_lengths`. Only
    buckets of at least one clip are returned, longest and largest first.
    """
    by_ratio: dict[int, list[Bucket]] = {}
    for clip in clips:
        by_ratio.setdefault(round(math.log2(clip[2] / clip[1]) * _RATIOS_PER_OCTAVE), []).append(clip)
    sizes = set()
    for similar in by_ratio.values():
        height = statistics.median(clip[1] for clip in similar)
        width = statistics.median(clip[2] for clip in similar)
        shrink = min(1.0, math.sqrt(_area(LARGEST_CHOSEN) / (height * width)))
        sizes.add(geometry.fitted(height * shrink, width * shrink))
    bucket_lengths = lengths or default_lengths([clip[0] for clip in clips], geometry)
    buckets = [(frames, *sides) for frames in bucket_lengths for sides in sizes]
    chosen = (choose_bucket(*clip, buckets) for clip in clips)
    used = {bucket for bucket in chosen if bucket is not None}
    return sorted(used or buckets, key=lambda bucket: (bucket[0], _area(bucket), bucket), reverse=True)


def default_lengths(frames: Sequence[int], geometry: Geometry) -> list[int]:
    """Return legal lengths of at most 49 frames, longest first, for clips with these numbers of usable frames.

    They are the largest one that a clip fills and, for shorter clips, as few as leave each at least two thirds of its
    frames, as far as legal lengths allow.
    """
    available = sorted(min(count, LARGEST_CHOSEN[0]) for count in frames)
    longest = legal_length(available[-1], geometry)
    lengths = [legal_length(available[0], geometry)]
    for count in available:
        if count < longest and lengths[-1] < _LEAST_USED * count:
            lengths.append(legal_length(count, geometry))
    return sorted({*lengths, longest}, reverse=True)


def legal_lengths(requested: Sequence[int], geometry: Geometry) -> tuple[list[int], list[str]]:
    """Return lengths rounded down to legal ones, longest first, and a note on each that was rounded.

    Raises:
        ValueError: the length of a video would become a single frame.
    """
    lengths: dict[int, None] = {}
    notes = []
    for length in requested:
        legal = legal_length(length, geometry)
        if legal == 1 < length:
            raise ValueError(
                f"{length} frames: lengths of this model must be {geometry.temporal}*k+1; use "
                f"{geometry.temporal + 1}, or 1 for images"
            )
        if legal != length:
            notes.append(f"{length} frames is not {geometry.temporal}*k+1; cut to {legal}")
        lengths[legal] = None
    return sorted(lengths, reverse=True), notes


def area_sizes(
    resolution: tuple[int, int], geometry: Geometry, *, count: int, min_ar: float, max_ar: float
) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the sizes `(height, width)` of one area, tallest first and all different, and notes on rounding.

    The aspect ratios r = width / height lie evenly spaced in log r, ends included (one alone lies in the middle). For
    an area A, the height is sqrt(A / r) and the width sqrt(A * r), each rounded to the nearest multiple that the model
    accepts.

    Args:
        resolution: height and width of an image of that area.
        geometry: of the model.
        count: number of aspect ratios, or 0 for only the shape of the resolution, rounded down.
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
                f"{name}: sides must be multiples of {multiple} in this model; use at least {multiple}x{multiple}"
            )
        note = f"{name} does not consist of multiples of {multiple}; cut to {rounded[0]}x{rounded[1]}"
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
                f"{name}: at the aspect ratio {math.exp(log_ratio):.3g} a side is below {multiple} pixels, the "
                "minimum of this model; use a larger resolution, or aspect ratios nearer to 1"
            )
        sizes[size] = None
    return list(sizes), []


def filled_resolution(height: int, width: int, resolutions: Sequence[Sequence[Bucket]]) -> Sequence[Bucket]:
    """Return the buckets of the largest resolution that a clip of this size fills, or of the smallest resolution.

    Args:
        height, width: of the clip.
        resolutions: the buckets of each resolution, largest area first.
    """
    for buckets in resolutions:
        if height * width >= _SAME_AREA * max(map(_area, buckets)):
            return buckets
    return resolutions[-1]


def lower_buckets(
    bucket: Bucket, height: int, width: int, buckets: Sequence[Bucket], *, shorter: bool = False
) -> list[Bucket]:
    """Return the lower buckets that a clip of this size falls through to, in order.

    It falls to the next lower resolution of the same length, there to the nearest aspect ratio, and so on.

    Args:
        bucket: of the clip.
        height, width: of the clip.
        buckets: all buckets.
        shorter: whether the next shorter lengths follow, from their highest resolution. Videos never become images.
    """
    lengths = [bucket[0]]
    if shorter:
        lengths += sorted({other[0] for other in buckets if 1 < other[0] < bucket[0]}, reverse=True)
    lower: list[Bucket] = []
    limit = _SAME_AREA * _area(bucket)
    for length in lengths:
        while below := [other for other in buckets if other[0] == length and _area(other) <= limit]:
            top = max(map(_area, below))
            same_resolution = [other for other in below if _area(other) > _SAME_AREA * top]
            chosen = choose_bucket(length, height, width, same_resolution)
            assert chosen is not None, "a bucket of this length is there"
            lower.append(chosen)
            limit = _SAME_AREA * _area(chosen)
        limit = math.inf
    return lower


def bucket_probabilities(buckets: Sequence[Bucket], keep: Mapping[Bucket, float]) -> list[float]:
    """Return the probabilities that a clip ends in each of the buckets that it may fall through, in order.

    They sum to less than 1 if a clip may be left out.
    """
    probabilities = []
    rest = 1.0
    for bucket in buckets:
        share = keep.get(bucket, 1.0)
        probabilities.append(rest * share)
        rest *= 1.0 - share
    return probabilities


def num_batches(count: float, size: int, epoch_end: EpochEnd) -> int:
    """Return the number of batches of a bucket in an epoch; for `wrap`, without clips of the epoch before."""
    return (math.ceil if epoch_end in ("keep", "pad") else math.floor)(count / size)


def nearest_bucket(bucket: Bucket, buckets: Sequence[Bucket]) -> Bucket:
    """Return the bucket whose length, height and width differ least, as factors."""
    return min(
        buckets, key=lambda other: (sum(abs(math.log(a / b)) for a, b in zip(other, bucket, strict=True)), other)
    )


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
    """Return the largest length up to `frames` that the model accepts."""
    return (frames - 1) // geometry.temporal * geometry.temporal + 1
