"""The meter: rate and time left, as a bar or as lines."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from finetrainers.utils import progress
from finetrainers.utils.progress import Meter, Stages


def test_the_meter_says_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.INFO), Meter("encoded", "clips") as meter:
        for done in range(1, 101):
            clock[0] += 4 if done <= 50 else 0.1
            meter(done, 100)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "encoded 3 of 100 clips, 4 s each, 6 min left"
    assert lines[-1] == "encoded 100 of 100 clips, 2.05 s each"
    assert 15 < len(lines) < 20
    caplog.clear()
    Meter("encoded", "clips", enabled=False)(1, 1)
    assert not caplog.records
    screen = io.StringIO()
    with Meter("encoded", "clips") as meter:
        meter.console = Console(file=screen, force_terminal=True, width=100)
        meter(1, 2)
        meter(2, 2)
    assert "2/2" in screen.getvalue()


def test_each_stage_has_a_meter_and_a_short_one_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.INFO), Stages(bars=False) as stages:
        for stage, seconds in (("read headers", 0.1), ("decoded files", 6.0), ("compared files", 0.1)):
            for done in range(1, 6):
                clock[0] += seconds
                stages(stage, done, 5)
    assert [record.getMessage() for record in caplog.records] == [
        "decoded 3 of 5 files, 4 s each, 8 s left", "decoded 5 of 5 files, 4.8 s each",
    ]  # fmt: skip
