"""Tests are shared out so that no worker begins anything long while the others have nothing left to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from shares import in_shares


@dataclass(frozen=True)
class Item:
    path: Path
    number: int
    mark: str | None = None

    def get_closest_marker(self, name: str) -> Any:
        return self.mark if name == self.mark else None


def module(name: str, count: int, mark: str | None = None) -> list[Any]:
    """Tests of a module; its second one has the mark."""
    return [Item(Path(name), n, mark if n == 1 else None) for n in range(count)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_shares_begin_with_whole_modules_that_take_long(workers: int) -> None:
    items = [
        *module("a", 30), *module("b", 4, "slow"), *module("c", 2, "timeout"), *module("d", 30, "other"),
        *module("e", 3, "slow"),
    ]  # fmt: skip
    found = in_shares(items, workers)
    assert len(found) == len(items)
    assert set(found) == set(items)
    begins, begin = [], 0
    for worker in range(workers):
        begins.append(begin)
        begin += (len(items) - begin) // (workers - worker)
    names = ["".join(item.path.name for item in found[start : start + 10]) for start in begins]
    expected = {1: ["bbbbcceeea"], 2: ["bbbbeeeaaa", "ccaaaddddd"], 3: ["bbbbaaaaaa", "ccaaaaaaaa", "eeeddddddd"]}
    assert names == expected[workers]


def test_all_are_there_where_most_take_long() -> None:
    items = [*module("a", 9, "slow"), *module("b", 2)]
    assert in_shares(items, 2) == items
