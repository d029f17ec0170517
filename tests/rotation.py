"""Rotating tests: a run of the whole suite takes a tenth of those marked `rotating`, another tenth on each day.

They repeat a mechanism, which other tests cover in every run, with another engine, family, launcher or benchmark. A run that
names files, tests or keywords takes all that it names. `--rotation N` takes the tenth with this number, `-m ""` all tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
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
    """Mark the rotating tests that have their turn with `today`; pytest deselects the others by `-m` of pyproject.toml."""
    turn = _turn(config)
    groups = {item: group for item in items if (group := _group(item)) is not None}
    turns = turns_of(groups.values())
    for item, group in groups.items():
        if turn is None or turns[group] == turn:
            item.add_marker("today")


def turns_of(groups: Iterable[str]) -> dict[str, int]:
    """Return the turn of each group of tests, from 0 to `TURNS` - 1; the turns have as many groups each, or one more."""
    return {group: number % TURNS for number, group in enumerate(sorted(set(groups)))}


def _group(item: pytest.Item) -> str | None:
    """Return the name of the tests that run together with a rotating one, or None if it does not rotate.

    `rotating("name")` names the group, such as tests that share an expensive fixture; without a name, a test is its own.
    """
    mark = item.get_closest_marker("rotating")
    if mark is None:
        return None
    return str(mark.args[0]) if mark.args else item.nodeid


def _turn(config: pytest.Config) -> int | None:
    """Return which tenth of the rotating tests runs, or None if all of them do."""
    if hasattr(config, "workerinput"):
        return config.workerinput["rotation"]
    if config.option.rotation is not None:
        return config.option.rotation
    if config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword:
        return None
    return int(time.time() // _DAY_S) % TURNS
