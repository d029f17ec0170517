"""Which size a clip is cut to: pure functions over `(frames, height, width)` buckets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from finetrainers.config.geometry import Geometry

Bucket = tuple[int, int, int]

_DEFAULT_MAX_FRAMES = 49
_DEFAULT_MAX_AREA = 512 * 768


def choose_bucket(frames: int, height: int, width: int, buckets: Sequence[Bucket]) -> Bucket | None:
    """The bucket of a clip with `frames` usable frames; None when it is too short for every bucket.

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


def default_buckets(clips: Sequence[Bucket], geometry: Geometry) -> list[Bucket]:
    """Buckets for a user who named none, from the usable frames, height and width of each clip.

    The size is the median height and width, shrunk to at most 512x768 pixels of area and rounded down to what the
    model accepts. Lengths are the largest legal ones not above the median clip (49 at most) and not above the
    shortest clip, so that every clip fits somewhere.
    """
    height = statistics.median(clip[1] for clip in clips)
    width = statistics.median(clip[2] for clip in clips)
    shrink = min(1.0, math.sqrt(_DEFAULT_MAX_AREA / (height * width)))
    multiple = geometry.size_multiple
    sides = [max(int(side * shrink) // multiple * multiple, multiple) for side in (height, width)]
    lengths = [clip[0] for clip in clips]
    wanted = {min(int(statistics.median(lengths)), _DEFAULT_MAX_FRAMES), min(*lengths, _DEFAULT_MAX_FRAMES)}
    legal = {(frames - 1) // geometry.temporal * geometry.temporal + 1 for frames in wanted}
    return [(frames, sides[0], sides[1]) for frames in sorted(legal, reverse=True)]


def cover_size(height: int, width: int, bucket_height: int, bucket_width: int) -> tuple[int, int]:
    """The smallest `(height, width)` of a clip's own aspect ratio that covers a bucket."""
    scale = max(bucket_height / height, bucket_width / width)
    return max(round(height * scale), bucket_height), max(round(width * scale), bucket_width)
