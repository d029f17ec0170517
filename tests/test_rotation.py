"""Rotating tests: every one of them has its turn within ten days, and a run that names tests takes them all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rotation import TURNS, turns_of

SETTINGS = """
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = '--strict-markers -m "not rotating or today"'
pythonpath = ["{folder}"]
markers = ["rotating", "today"]
"""
TESTS = """
import pytest

def test_always(): pass

@pytest.mark.rotating
def test_alone(): pass

@pytest.mark.rotating
@pytest.mark.parametrize("case", range(20))
def test_twenty(case): pass

@pytest.mark.rotating
@pytest.mark.parametrize("case", range(3))
def test_three(case): pass

@pytest.mark.rotating("pair")
@pytest.mark.parametrize("case", range(2))
def test_together(case): pass
"""


def test_each_part_has_one_turn_and_turns_are_alike() -> None:
    parts = {"alone": 1, "two": 2, "three": 3, "many": TURNS, "pair": 1}
    turns = turns_of(parts)
    assert sorted(turns) == sorted((name, part) for name, count in parts.items() for part in range(count))
    assert sorted(list(turns.values()).count(turn) for turn in range(TURNS)) == [1] * 3 + [2] * 7
    for name, count in parts.items():  # no run has two parts of a test
        assert len({turns[name, part] for part in range(count)}) == count


def test_a_run_takes_a_tenth_unless_it_names_tests(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text(SETTINGS.format(folder=Path(__file__).parent))
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["rotation"]\n')
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)

    def passed(*arguments: str) -> int:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *arguments]
        alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        result = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120)
        passed = re.search(r"(\d+) passed", result.stdout)
        assert passed is not None, result.stdout + result.stderr
        return int(passed.group(1))

    # Two of 20 cases; the pair, the one alone and each of three cases have a turn each; and the one that always runs.
    assert (passed("--rotation", "0"), passed("--rotation", "2"), passed("--rotation", "5")) == (5, 4, 3)
    assert passed("--rotation", "0", "-n", "2") == 5
    assert passed() in (3, 4, 5)
    for named in (["-m", ""], ["tests/test_it.py"], ["-k", "test"]):
        assert passed(*named) == 27
