"""The search for a batch size, against trying every size, on memory and times that are formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetrainers.tools.batch_search.sizes import Trial, best, largest_fitting, search


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), min_size=1, max_size=3), st.integers(0, 3), st.floats(0, 60),
    st.sampled_from([1, 2, 30, 128]),
)  # fmt: skip
def test_the_largest_that_fits_is_found_with_few_questions(
    phases: list[tuple[float, float]], jumps: int, limit: float, most: int
) -> None:
    """The peak of several phases, each a line, and of a network that takes clips one by one if many are too large."""
    asked: list[int] = []

    def peak(size: int) -> float:
        return max(persistent_bytes + slope * size for persistent_bytes, slope in phases) + jumps * (size >= 20)

    def needed(size: int) -> float:
        asked.append(size)
        return peak(size)

    assert largest_fitting(needed, limit=limit, max_clips=most) == sum(
        peak(size) <= limit for size in range(1, most + 1)
    )
    assert len(asked) == len(set(asked)) <= 14
    assert all(1 <= size <= most for size in asked)


def test_one_line_takes_four_questions() -> None:
    asked: list[int] = []
    assert largest_fitting(lambda size: (asked.append(size), 5.0 + 1.5 * size)[1], limit=40, max_clips=128) == 23
    assert asked[:2] == [1, 2]
    assert len(asked) <= 5


class Card:
    """A GPU on which n clips take `base + slope * n` GiB, and run out of memory above `size`."""

    def __init__(
        self, *, base: float, slope: float, size: float, margin: float = 0.0, knee: int = 4, step: int = 0
    ) -> None:
        self.base, self.slope, self.size, self.limit = base, slope, size, size - margin
        self.knee, self.step = knee, step
        self.asked: list[int] = []

    def peak(self, clips: int) -> float:
        workspace = 0.3 * (clips // self.step) ** 0.5 if self.step else 0.0
        return self.base + self.slope * clips + workspace

    def trial(self, clips: int) -> Trial:
        peak = self.peak(clips)
        if peak > self.size:
            return Trial(clips, "out of memory")
        # Each clip costs the same once `knee` of them fill the GPU.
        seconds = 1.0 * max(clips, self.knee)
        return Trial(clips, None if peak <= self.limit else "over the limit", seconds, peak)

    def measure(self, clips: int) -> Trial:
        self.asked.append(clips)
        return self.trial(clips)


@given(
    st.floats(1, 30), st.floats(0.05, 6), st.floats(20, 80), st.floats(0, 4), st.integers(1, 40), st.integers(0, 5),
    st.integers(0, 128), st.sampled_from([1, 3, 16, 128]),
)  # fmt: skip
def test_search_finds_what_trying_every_size_finds(
    base: float, slope: float, size: float, margin: float, knee: int, step: int, start: int, most: int
) -> None:
    card = Card(base=base, slope=slope, size=size, margin=margin, knee=knee, step=step)
    trials = search(card.measure, start=start, max_clips=most, limit=card.limit)
    every = [card.trial(clips) for clips in range(1, most + 1)]
    largest = max((trial.clips for trial in every if trial.fits), default=0)
    found_largest = max((trial.clips for trial in trials if trial.fits), default=0)
    # Workspace that grows in jumps bends the line, by a clip at most.
    assert 0 <= largest - found_largest <= bool(step)
    assert len(card.asked) == len(set(card.asked)) <= 18
    found, wanted = best(trials), max(every, key=lambda trial: trial.rate if trial.fits else -1.0)
    if not largest:
        assert found is None
        assert card.asked == [1]
    else:
        assert found is not None
        # Halves are tried, not every size: of equal throughput, the knee or the next half above it. A clip less than
        # the largest size has its share of the throughput less.
        assert found.rate == pytest.approx(wanted.rate, rel=0.021 + (largest - found_largest) / largest)


def test_few_sizes_are_measured_where_memory_is_a_line() -> None:
    card = Card(base=10, slope=3, size=40, margin=2, knee=1)
    trials = search(card.measure, start=7, max_clips=128, limit=card.limit)
    # One clip, the estimate, what the line says; then halves: throughput is the same at all sizes.
    assert card.asked == [1, 7, 9, 4, 2]
    assert [trial.clips for trial in trials if trial.fits] == [1, 7, 9, 4, 2]
    chosen = best(trials)
    assert chosen is not None
    assert chosen.clips == 1


def test_an_estimate_that_is_too_high_is_corrected() -> None:
    card = Card(base=10, slope=3, size=40, margin=2, knee=9)
    trials = search(card.measure, start=60, max_clips=128, limit=card.limit)
    assert not next(trial for trial in trials if trial.clips == 60).fits
    chosen = best(trials)
    assert chosen is not None
    assert chosen.clips == 9
    assert len(trials) <= 9


def test_without_a_rising_peak_sizes_double() -> None:
    """As on a CPU, where the peak of the process says little."""
    tried = search(lambda size: Trial(size, None, 1.0, 5.0), start=1, max_clips=12, limit=100)
    assert [trial.clips for trial in tried] == [1, 2, 4, 8, 12, 6]
