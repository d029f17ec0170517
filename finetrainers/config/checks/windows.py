"""Rules of sliding windows: windows that cannot be cut, and options without effect."""

from __future__ import annotations

from collections.abc import Iterator

from ..geometry import Geometry
from ..root import TrainConfig
from ..sections import DataSection


def window_problems(data: DataSection, geometry: Geometry) -> Iterator[tuple[str, str]]:
    """Yield (option, reason) for each reason why the windows of a dataset cannot be cut."""
    size = data.sliding_window_size
    if size is None:
        return
    for problem in geometry.length_problems(size):
        yield "sliding_window_size", problem
    lengths = [("video_resolution_buckets", f"{'x'.join(map(str, b))}: ", b[0]) for b in data.video_resolution_buckets]
    for option, bucket, frames in [*lengths, *(("frame_buckets", "", frames) for frames in data.frame_buckets)]:
        if 1 < frames < size:
            yield (
                option,
                f"{bucket}windows of {size} frames cannot be cut from {frames}; use a longer length, or none, or a "
                "smaller --sliding_window_size",
            )
    if data.frame_selection not in ("head", "middle"):
        yield (
            "frame_selection",
            f"{data.frame_selection} has no effect with --sliding_window_size, whose windows start everywhere in a "
            "clip; remove it",
        )


def window_warnings(config: TrainConfig) -> Iterator[str]:
    """Warn if every bucket is as long as a window."""
    data = config.data
    listed = (*(frames for frames, *_ in data.video_resolution_buckets), *data.frame_buckets)
    if {frames for frames in listed if frames > 1} == {data.sliding_window_size}:
        yield (
            f"every bucket of videos cuts clips to {data.sliding_window_size} frames, which is one window of "
            "--sliding_window_size; set the buckets to the length of the clips"
        )
