"""Which batch sizes to try, and which one to take: the search itself, from numbers alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor

#: Throughputs that differ by less are equal: a measurement of few steps is not more exact.
SAME_RATE = 0.02


@dataclass(frozen=True)
class Trial:
    """One measured batch size.

    Attributes:
        clips: of a micro-batch.
        error: why it does not fit; None if it fits.
        seconds: of a micro-batch, with its share of the update; None: it ran out of memory.
        peak: GiB at most; None: it ran out of memory.
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
        """Clips a second; 0 if it ran out of memory."""
        return self.clips / self.seconds if self.seconds else 0.0


def largest_fitting(needed: Callable[[int], float], *, limit: float, most: int) -> int:
    """The largest number up to `most` that fits, if more never need less; 0: not even 1 does.

    An estimate costs a second, and is nearly a straight line: so the next number to ask about is where the line through
    two known ones reaches the limit. Every third question halves what is left, whatever the line says.

    Args:
        needed: GiB of a number.
        limit: GiB that may be taken.
        most: the largest number to ask about.
    """
    low, high, known = 0, most + 1, dict[int, float]()
    wanted: int | None = 1
    while high - low > 1:
        size = min(max((low + high) // 2 if wanted is None else wanted, low + 1), high - 1)
        known[size] = needed(size)
        low, high = (size, high) if known[size] <= limit else (low, size)
        if high > most:
            wanted = _reached(sorted(known.items())[-2:], limit) if len(known) > 1 else 2
        elif low:
            wanted = _reached([(low, known[low]), (high, known[high])], limit)
        if len(known) % 3 == 0:
            wanted = None
    return low


def search(measure: Callable[[int], Trial], *, start: int, most: int, limit: float) -> list[Trial]:
    """Measure one clip, then sizes around the estimate until the largest that fits is known, then halves of that.

    Peak memory is a straight line over the number of clips, but for the workspace of kernels. So each next size is the one
    at which the line through the two largest measured peaks reaches the limit. Halves of the largest size follow as long
    as they are not slower by more than `SAME_RATE`.

    Args:
        measure: measures a number of clips.
        start: what the estimate says is the largest.
        most: the largest to try.
        limit: GiB that may be taken.

    Returns:
        The trials in their order; the first one, of a single clip, may be the only one.
    """
    done = {1: measure(1)}
    low, high = int(done[1].fits), most + 1
    wanted = start
    while low and high - low > 1:
        size = min(max(wanted, low + 1), high - 1)
        done[size] = measure(size)
        if done[size].fits:
            low = size
        else:
            high = size
        reached = _reaches(done, limit)
        if reached is not None and reached <= low:
            break
        wanted = (low + high) // 2 if high <= most else 2 * low
        if reached is not None and reached < high:
            wanted = reached
        elif reached is not None and high > most:
            wanted = most
    _measure_halves(done, low, measure)
    return list(done.values())


def _measure_halves(done: dict[int, Trial], largest: int, measure: Callable[[int], Trial]) -> None:
    """Go down from the largest size until throughput falls."""
    rate, size = done[largest].rate if largest else 0.0, largest // 2
    while size >= 1:
        trial = done[size] if size in done else measure(size)
        done[size] = trial
        if trial.rate < (1 - SAME_RATE) * rate:
            return
        rate, size = max(rate, trial.rate), size // 2


def _reaches(done: Mapping[int, Trial], limit: float) -> int | None:
    """Where the line through the two largest measured peaks reaches the limit; see `_reached`."""
    return _reached(sorted((size, trial.peak) for size, trial in done.items() if trial.peak is not None)[-2:], limit)


def _reached(points: Sequence[tuple[int, float]], limit: float) -> int | None:
    """The largest number that a line through two points, of numbers and GiB, leaves below the limit; None: it does not rise."""
    if len(points) < 2:
        return None
    (less, lower), (more, higher) = points
    slope = (higher - lower) / (more - less)
    return floor(less + (limit - lower) / slope + 1e-9) if slope > 0 else None


def best(trials: Iterable[Trial]) -> Trial | None:
    """The fitting trial of the highest throughput; of those that are as fast within `SAME_RATE`, the smallest. None: nothing fits."""
    fitting = [trial for trial in trials if trial.fits]
    fastest = max((trial.rate for trial in fitting), default=0.0)
    as_fast = [trial for trial in fitting if trial.rate >= (1 - SAME_RATE) * fastest]
    return min(as_fast, key=lambda trial: trial.clips, default=None)
