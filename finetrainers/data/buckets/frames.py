"""Frame selection: pure arithmetic on frame numbers, rates and times."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Literal

Selection = Literal["head", "middle", "random", "uniform", "chunk"]

# 23.976 and 24, or 29.97 and 30, count as the same rate: resampling would only drop a frame here and there.
SAME_RATE = 0.02


def playback_fps(source_fps: float, target_fps: float) -> float:
    """Return the rate at which a clip is sampled: the target, or the clip's rate if that is lower or nearly the same.

    A slower clip is not brought to the target, since that would repeat frames.
    """
    return source_fps if source_fps <= target_fps * (1 + SAME_RATE) else target_fps


def is_slower(source_fps: float, target_fps: float) -> bool:
    """Return whether a clip's own rate is lower than the target, beyond rounding."""
    return source_fps < target_fps * (1 - SAME_RATE)


def sampling_fps(rates: Iterable[float], model_fps: float) -> float:
    """Return the rate of samples of a model trained on clips of these rates.

    It is the median of the rates, or the model's rate if that is nearly the same.
    """
    median = round(median_low([*rates] or [model_fps]), 3)
    return model_fps if abs(median - model_fps) <= SAME_RATE * model_fps else median


def num_available(num_frames: int, *, source_fps: float, fps: float) -> int:
    """Return how many frames a clip of `num_frames` gives at `fps`: those k with round(k * source_fps / fps) inside it.

    For frames that are not evenly spaced, `source_fps` must be their mean rate. The clip then has the duration of its
    times, and the number also holds for `select_frames` with these times.
    """
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
    times: Sequence[float] | None = None,
) -> tuple[list[int], float]:
    """Choose `length` frame numbers of a clip, and the frame rate that they play at.

    Frame k of the sampled clip is the source frame nearest to time k / fps, so that speed of motion is kept. With
    `times`, it is the frame shown at time k / fps plus half a mean period of the source, which is the same for even
    times. An image that stands still for long therefore also stands still in the sampled clip.

    Args:
        num_frames: frames of the source.
        source_fps: rate of the source; with `times` their mean rate.
        fps: rate to sample at, not above `source_fps`; see `playback_fps`. Not used by `uniform`.
        length: number of frames to choose.
        mode: the first frames (`head`), those in the `middle`, a `random` segment, or `uniform`: spread evenly from the
            first frame to the last, whatever the rate, which changes the speed of motion. `chunk` is the first segment,
            or the one that `start` names.
        draw: any non-negative integer; determines where `random` starts.
        start: the first frame, counted after resampling to `fps`, instead of the one that `mode` determines; see
            `windows.window_starts`.
        times: second at which each frame of the source is shown, from 0, or None if they are evenly spaced.

    Raises:
        ValueError: the clip has fewer frames than `length`, or fewer from `start` on.
    """
    is_uniform = mode == "uniform" and start is None
    available = num_frames if is_uniform else num_available(num_frames, source_fps=source_fps, fps=fps)
    slack = available - length
    if start is None:
        start = {"middle": slack // 2, "random": draw % (max(slack, 0) + 1)}.get(mode, 0)
    if start > slack:
        after = f" after frame {start}" if start else ""
        raise ValueError(
            f"{length} frames requested{after}, but only {available} of {num_frames} are available at {fps:g} fps"
        )
    if is_uniform and length == 1:
        return [(num_frames - 1) // 2], source_fps
    ratio = (num_frames - 1) / (length - 1) if is_uniform else source_fps / fps
    fps = source_fps / ratio if is_uniform else fps
    # In mean periods of the source.
    moments = [(start + k) * ratio + 0.5 for k in range(length)]
    if times is None:  # rounded half up; `round` rounds half to even, which makes strides uneven
        numbers = [math.floor(moment) for moment in moments]
    else:  # adds a microsecond, since times may be rounded
        numbers = [bisect_right(times, moment / source_fps + 1e-6) - 1 for moment in moments]
    return [min(number, num_frames - 1) for number in numbers], fps
