"""Processes killed at random moments while they save: the newest checkpoint is whole every time, and it is the
run's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_process import Python

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "checkpoint_kills.py"


def count(python: Python, *arguments: str, directory: Path) -> tuple[int, int]:
    """Good newest checkpoints, and kills that hit a save."""
    done = python(str(SCRIPT), "--directory", str(directory), *arguments)
    assert done.wait(120) == 0, done.stderr
    found = re.search(r": (\d+) of \d+ kills left a good newest checkpoint; (\d+) kills hit a save", done.stdout)
    assert found is not None, done.stdout
    return int(found[1]), int(found[2])


@pytest.mark.rotating
def test_every_kill_leaves_a_good_newest_checkpoint(python: Python, tmp_path: Path) -> None:
    good, hit = count(python, "--kills", "25", directory=tmp_path)
    assert good == 25
    assert hit >= 5, "too few kills came while something was being written"


@pytest.mark.rotating
def test_so_does_every_kill_during_a_save_in_the_background(python: Python, tmp_path: Path) -> None:
    good, hit = count(python, "--background", "--kills", "10", directory=tmp_path)
    assert good == 10
    assert hit >= 2, "too few kills came while something was being written"


@pytest.mark.rotating
def test_a_command_that_is_killed_while_it_saves_ends_like_any_other(python: Python, tmp_path: Path) -> None:
    done = python(str(SCRIPT), "--directory", str(tmp_path), "--command", "--kills", "3")
    assert done.wait(120) == 0, done.stderr
    assert "3 of 3 kills " in done.stdout
    assert "bit for bit" in done.stdout


@pytest.mark.rotating
def test_the_control_loses_checkpoints(python: Python, tmp_path: Path) -> None:
    """Written in place, some newest checkpoints are lost: the test above can fail."""
    good, _ = count(python, "--kills", "25", "--in_place", directory=tmp_path)
    assert good < 25
