"""The meter: rate and time left, as a bar or as lines."""

from __future__ import annotations

import io
import logging
import time

import pytest
from rich.console import Console

from finetrainers.utils import progress
from finetrainers.utils.progress import Meter, Stages


def test_the_meter_says_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.INFO), Meter("encoded", "clips") as meter:
        meter(0, 100)
        clock[0] += 4
        meter(0, 100)
        for done in range(1, 101):
            clock[0] += 4 if done <= 50 else 0.1
            meter(done, 100)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].split()[:2] == ["encoded", "0"]  # before the first one is done
    assert lines[1] == "encoded 1 of 100 clips, 8 s each, 13 min left"
    assert lines[-1] == "encoded 100 of 100 clips, 2.09 s each"
    assert 30 < len(lines) < 45  # fewer as time goes on
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
        "decoded 2 of 5 files, 3 s each, 9 s left", "decoded 3 of 5 files, 4 s each, 8 s left",
        "decoded 4 of 5 files, 4.5 s each, 4 s left", "decoded 5 of 5 files, 4.8 s each",
    ]  # fmt: skip


def test_work_without_a_count_and_a_first_piece_that_takes_long_are_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a call, and only after some seconds."""
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.05)
    monkeypatch.setattr(progress, "_POLL_S", 0.01)

    def wait_for_lines() -> None:
        while not caplog.records:
            time.sleep(0.01)

    with caplog.at_level(logging.INFO):
        with progress.working("loading"):
            wait_for_lines()
        assert caplog.records[0].getMessage().startswith("loading, 0.")
        caplog.clear()
        with Meter("encoded", "clips") as meter:
            meter(0, 5)
            wait_for_lines()
        assert caplog.records[0].getMessage().startswith("encoded 0 of 5 clips, 0.")
        monkeypatch.setattr(progress, "_INTERVAL_S", 60.0)
        caplog.clear()
        with progress.working("loading the network"):
            time.sleep(0.05)
        assert not caplog.records
