"""Which frames of a clip are taken: pure arithmetic on frame numbers and rates."""

from __future__ import annotations

import math
from typing import Literal

Selection = Literal["head", "middle", "random", "uniform"]

# 23.976 and 24, or 29.97 and 30, count as the same rate: resampling would only drop a frame here and there.
_SAME_RATE = 0.02


def playback_fps(source_fps: float, target_fps: float) -> float:
    """The rate at which a clip is sampled: the target, or the clip's own where that is lower or nearly the same.

    A slower clip is not brought to the target, since that would repeat frames.
    """
    return source_fps if source_fps <= target_fps * (1 + _SAME_RATE) else target_fps


def is_slower(source_fps: float, target_fps: float) -> bool:
    """Whether a clip's own rate is lower than the target, beyond rounding."""
    return source_fps < target_fps * (1 - _SAME_RATE)


def num_available(num_frames: int, *, source_fps: float, fps: float) -> int:
    """How many frames a clip of `num_frames` gives at `fps`: those k with round(k * source_fps / fps) inside it."""
    return math.ceil((num_frames - 0.5) * fps / source_fps - 1e-9)


def select_frames(
    num_frames: int,
    *,
    source_fps: float,
    fps: float,
    length: int,
    mode: Selection,
    draw: int = 0,
    start: int | None = None,
) -> tuple[list[int], float]:
    """Choose `length` frame numbers of a clip, and the frame rate that they play at.

    Frame k of the sampled clip is the source frame nearest to time k / fps, so that speed of motion is kept.

    Args:
        num_frames: frames of the source.
        source_fps: rate of the source.
        fps: rate to sample at, not above `source_fps`; see `playback_fps`. Not used by `uniform`.
        length: how many frames are wanted.
        mode: the first frames (`head`), those in the `middle`, a `random` stretch, or `uniform`: spread evenly from
            the first frame to the last, whatever the rate, which changes the speed of motion.
        draw: any non-negative integer; decides where `random` starts.
        start: the first frame, counted at `fps`, in place of what `mode` says.

    Raises:
        ValueError: the clip has fewer frames than wanted, or than wanted from `start` on.
    """
    spread = mode == "uniform" and start is None
    available = num_frames if spread else num_available(num_frames, source_fps=source_fps, fps=fps)
    if length > available:
        raise ValueError(f"{length} frames wanted, but only {available} of {num_frames} are available at {fps:g} fps")
    if start is not None and not 0 <= start <= available - length:
        raise ValueError(
            f"{length} frames wanted from frame {start} on, but only {available} are available at {fps:g} fps"
        )
    if spread:
        if length == 1:
            return [(num_frames - 1) // 2], source_fps
        step = (num_frames - 1) / (length - 1)
        return [_round(k * step) for k in range(length)], source_fps / step
    slack = available - length
    if start is None:
        start = {"head": 0, "middle": slack // 2, "random": draw % (slack + 1), "uniform": 0}[mode]
    ratio = source_fps / fps
    return [min(_round((start + k) * ratio), num_frames - 1) for k in range(length)], fps


def _round(value: float) -> int:
    """Round half up; `round` rounds half to even, which makes strides uneven."""
    return math.floor(value + 0.5)
