"""Rotating tests: a run of the whole suite takes a tenth of those marked `rotating`, another tenth on each day.

They repeat a mechanism with another family, strategy, launcher or benchmark. Each case of a parametrized test has its
own turn; of ten cases and more, every run takes a tenth. A run that names files, tests or keywords takes all that it
names. `--rotation N` takes the tenth with this number, `-m ""` all tests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

#: Days until a test has its turn again.
TURNS = 10
_DAY_S = 86400


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--rotation`."""
    message = f"run the tenth number N (0 to {TURNS - 1}) of the tests marked `rotating`; by default, chosen by the day"
    parser.addoption("--rotation", type=int, choices=range(TURNS), metavar="N", help=message)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist which tests have their turn: the day may end before it starts."""
    node.workerinput["rotation"] = _turn(node.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rotating tests that have their turn with `today`; pytest deselects the others by `-m` of
    pyproject.toml."""
    turn = _turn(config)
    rotating: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (name := _name(item)) is not None:
            rotating.setdefault(name, []).append(item)
    parts = {name: 1 if _is_named(group[0]) else min(len(group), TURNS) for name, group in rotating.items()}
    turns = turns_of(parts)
    for name, group in rotating.items():
        for number, item in enumerate(group):
            if turn is None or turns[name, number % parts[name]] == turn:
                item.add_marker("today")


def turns_of(parts: Mapping[str, int]) -> dict[tuple[str, int], int]:
    """Return the turn, from 0 to `TURNS` - 1, of each part of each test or group; the turns have as many each, or one
    more.

    Args:
        parts: number of parts of each test or group, at most `TURNS`: of a parametrized test a case each, or a tenth of
            its cases; otherwise 1.
    """
    units = [(name, part) for name in sorted(parts) for part in range(parts[name])]
    return {unit: number % TURNS for number, unit in enumerate(units)}


def _name(item: pytest.Item) -> str | None:
    """Return the name of the group of a rotating test, else that of its function, or None if it does not rotate.

    `rotating("name")` names a group, such as tests that share an expensive fixture, which has its turn on one day of
    ten.
    """
    mark = item.get_closest_marker("rotating")
    if mark is None:
        return None
    return str(mark.args[0]) if mark.args else item.nodeid.partition("[")[0]


def _is_named(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("rotating")
    return mark is not None and bool(mark.args)


def _turn(config: pytest.Config) -> int | None:
    """Return which tenth of the rotating tests runs, or None if all of them do."""
    if hasattr(config, "workerinput"):
        return config.workerinput["rotation"]
    if config.option.rotation is not None:
        return config.option.rotation
    if config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword:
        return None
    return int(time.time() // _DAY_S) % TURNS
