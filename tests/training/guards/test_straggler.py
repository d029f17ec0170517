"""Who is named as the rank that the others wait for, and when."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetrainers.training.guards.straggler import StragglerMonitor


@dataclass
class _TwoRanks:
    """Rank 0 of two, and what the other would tell."""

    rank: int = 0
    world_size: int = 2
    is_main: bool = True
    waited_s: float = 0.0
    other_waited_s: float = 0.0

    def max_on_host(self, values: list[int]) -> list[int]:
        return [values[0], round(1e6 * self.other_waited_s)]


@dataclass
class _Events:
    kept: list[dict[str, Any]] = field(default_factory=list)

    def event(self, name: str, **fields: Any) -> None:
        self.kept.append({"event": name, **fields})


def follow(waits: list[tuple[float, float]], *, step_s: float = 1.0, steps: int = 1) -> tuple[list[Any], list[Any]]:
    """Records and events when both ranks have waited so long since the last record, in seconds."""
    ranks, events = _TwoRanks(), _Events()
    pace = StragglerMonitor(parallel=ranks, run_dir=events)  # type: ignore[arg-type]
    records = []
    for step, (mine, other) in enumerate(waits, start=1):
        ranks.waited_s += mine  # counted from the start of the run
        ranks.other_waited_s = other
        records.append(pace.check_interval(step, steps=steps, step_s=step_s))
    return records, events.kept


def test_a_slow_rank_is_named_once_after_three_records(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        records, events = follow([(0.5, 0.1)] * 6)
    assert events == [{"event": "straggler", "step": 3, "rank": 1, "waiting_s": 0.4, "step_s": 1.0}]
    assert [record.args for record in caplog.records] == [(1, pytest.approx(0.4), 1.0)]
    assert [record["slowest_rank"] for record in records] == [1.0] * 6
    assert [record["waiting_s"] for record in records] == pytest.approx([0.4] * 6)


def test_ranks_that_are_slow_in_turns_are_not_named() -> None:
    assert follow([(0.5, 0.0), (0.5, 0.0), (0.0, 0.5)] * 4)[1] == []


def test_a_short_wait_is_not_worth_a_word() -> None:
    assert follow([(0.19, 0.0)] * 6)[1] == []
    assert [event["step"] for event in follow([(0.21, 0.0)] * 6)[1]] == [3]
    # One short wait between begins the count again.
    assert [event["step"] for event in follow([(0.5, 0.0), (0.5, 0.0), (0.1, 0.0), *[(0.5, 0.0)] * 3])[1]] == [6]


def test_waiting_is_counted_per_step() -> None:
    records, events = follow([(2.0, 0.0)] * 3, steps=10)
    assert [record["waiting_s"] for record in records] == pytest.approx([0.2] * 3)
    assert events == []  # a fifth of a step, not more
    assert len(follow([(2.1, 0.0)] * 3, steps=10)[1]) == 1


def test_one_rank_waits_for_nobody() -> None:
    monitor = StragglerMonitor(parallel=_TwoRanks(world_size=1), run_dir=_Events())  # type: ignore[arg-type]
    assert monitor.check_interval(1, steps=1, step_s=1.0) == {}
