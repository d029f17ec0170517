"""Choice of the batch sizes to try, and of the one to use: the search itself, from numbers alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite

#: Throughputs that differ by less count as equal: a measurement of few steps is not more exact.
SAME_RATE = 0.02


@dataclass(frozen=True)
class Trial:
    """Measured batch size.

    Attributes:
        clips: of a micro-batch.
        error: why it does not fit, or None if it fits.
        seconds: of a micro-batch, with its share of the update, or None if it ran out of memory.
        peak: maximum GiB, or None if it ran out of memory.
    """

    clips: int
    error: str | None = None
    seconds: float | None = None
    peak: float | None = None

    @property
    def fits(self) -> bool:
        """Whether it leaves the margin."""
        return self.error is None

    @property
    def rate(self) -> float:
        """Clips per second; 0 if it ran out of memory."""
        return self.clips / self.seconds if self.seconds else 0.0


def largest_fitting(needed: Callable[[int], float], *, limit: float, max_clips: int) -> int:
    """Return the largest number up to `max_clips` that fits, if more never need less; 0 if not even 1 does.

    An estimate costs a second, and is nearly a straight line: so the next number to estimate is the one at which the
    line through two known points reaches the limit. Every third estimate halves the interval, whatever the line
    predicts.

    Args:
        needed: function that returns the GiB of a number.
        limit: GiB that may be used.
        max_clips: the largest number to try.
    """
    low, high, estimates = 0, max_clips + 1, dict[int, float]()
    next_size: int | None = 1
    while high - low > 1:
        size = min(max((low + high) // 2 if next_size is None else next_size, low + 1), high - 1)
        estimates[size] = needed(size)
        low, high = (size, high) if estimates[size] <= limit else (low, size)
        if high > max_clips:
            next_size = _extrapolate(sorted(estimates.items())[-2:], limit) if len(estimates) > 1 else 2
        elif low:
            next_size = _extrapolate([(low, estimates[low]), (high, estimates[high])], limit)
        if len(estimates) % 3 == 0:
            next_size = None
    return low


def search(measure: Callable[[int], Trial], *, start: int, max_clips: int, limit: float) -> list[Trial]:
    """Measure one clip, then sizes around the estimate until the largest that fits is known, then halves of that.

    Peak memory is a straight line over the number of clips, except for the workspace of kernels. So each next size is
    the one at which the line through the two largest measured peaks reaches the limit. Halves of the largest size
    follow as long as they are not slower by more than `SAME_RATE`.

    Args:
        measure: measures a number of clips.
        start: the largest size by the estimate.
        max_clips: the largest size to try.
        limit: GiB that may be used.

    Returns:
        The trials in their order; the first one, of a single clip, may be the only one.
    """
    trials = {1: measure(1)}
    low, high = int(trials[1].fits), max_clips + 1
    next_size = start
    while low and high - low > 1:
        size = min(max(next_size, low + 1), high - 1)
        trials[size] = measure(size)
        if trials[size].fits:
            low = size
        else:
            high = size
        peaks = sorted((size, trial.peak) for size, trial in trials.items() if trial.peak is not None)
        predicted = _extrapolate(peaks[-2:], limit)
        if predicted is not None and predicted <= low:
            break
        next_size = (low + high) // 2 if high <= max_clips else 2 * low
        if predicted is not None and predicted < high:
            next_size = predicted
        elif predicted is not None and high > max_clips:
            next_size = max_clips
    _measure_halves(trials, low, measure)
    return list(trials.values())


def _measure_halves(trials: dict[int, Trial], largest: int, measure: Callable[[int], Trial]) -> None:
    """Measure halves of the largest size until throughput falls."""
    rate, size = trials[largest].rate if largest else 0.0, largest // 2
    while size >= 1:
        trial = trials[size] if size in trials else measure(size)
        trials[size] = trial
        if trial.rate < (1 - SAME_RATE) * rate:
            return
        rate, size = max(rate, trial.rate), size // 2


def _extrapolate(points: Sequence[tuple[int, float]], limit: float) -> int | None:
    """Return the largest number that a line through two points, of numbers and GiB, keeps below the limit.

    It is None if there are fewer points, or the line does not rise.
    """
    if len(points) < 2:
        return None
    (less, lower), (more, higher) = points
    slope = (higher - lower) / (more - less)
    reached = less + (limit - lower) / slope + 1e-9 if slope > 0 else inf
    return floor(reached) if isfinite(reached) else None


def best(trials: Iterable[Trial]) -> Trial | None:
    """Return the fitting trial of the highest throughput, or None if nothing fits.

    Of trials that are as fast within `SAME_RATE`, it is the smallest.
    """
    fitting = [trial for trial in trials if trial.fits]
    fastest = max((trial.rate for trial in fitting), default=0.0)
    as_fast = [trial for trial in fitting if trial.rate >= (1 - SAME_RATE) * fastest]
    return min(as_fast, key=lambda trial: trial.clips, default=None)
