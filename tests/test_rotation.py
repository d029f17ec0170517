"""Rotating tests: every one of them has its turn within ten days, and a run that names tests takes them all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rotation import TURNS, owns_item, turns_of

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


def test_each_group_has_one_turn() -> None:
    turns = turns_of([f"test_{number}" for number in range(25)] * 2)
    assert len(turns) == 25
    assert sorted(list(turns.values()).count(turn) for turn in range(TURNS)) == [2] * 5 + [3] * 5


@pytest.mark.parametrize("cases", [2, 3, 10, 25])
def test_each_case_has_a_turn_and_each_turn_a_case(cases: int) -> None:
    taken = [[number for number in range(cases) if owns_item(number, cases, turn)] for turn in range(TURNS)]
    assert all(taken)
    assert {number for turn in taken for number in turn} == set(range(cases))


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

    # Of 20 cases two, of three one; the pair and the one alone have a turn each.
    assert (passed("--rotation", "0"), passed("--rotation", "1"), passed("--rotation", "2")) == (6, 5, 4)
    assert passed("--rotation", "1", "-n", "2") == 5
    assert passed() in (4, 5, 6)
    for named in (["-m", ""], ["tests/test_it.py"], ["-k", "test"]):
        assert passed(*named) == 27
