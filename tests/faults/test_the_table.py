"""The table of faults names tests that exist, counts them right, and describes the points and kinds that there are."""

from __future__ import annotations

import re
from pathlib import Path

from finetrainers.utils.faults import KINDS, POINTS

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")


def rows() -> dict[int, list[str]]:
    """Number of a fault -> the tests that its row names."""
    found = re.findall(r"^\| (\d+) \| .* \| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert len({number for number, _ in found}) == len(found)
    return {int(number): re.findall(r"`([\w/]+\.py::\w+)`", tests) for number, tests in found}


def test_every_row_names_tests_that_exist() -> None:
    for number, tests in rows().items():
        assert tests, f"fault {number} names no test"
        for test in tests:
            file, _, name = test.partition("::")
            text = (TESTS / file).read_text(encoding="utf-8") if (TESTS / file).is_file() else ""
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"fault {number}: no test {test}"


def test_the_rows_are_in_order_and_counted() -> None:
    numbers = list(rows())
    assert numbers == sorted(numbers)
    assert set(numbers) <= set(range(1, 53))
    assert f"covers {len(numbers)} of 52 cataloged faults" in PAGE


def test_every_fault_test_has_its_row() -> None:
    named = {test for tests in rows().values() for test in tests}
    for file in Path(__file__).parent.glob("test_*.py"):
        if file != Path(__file__):
            for name in re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE):
                assert f"faults/{file.name}::{name}" in named


def test_points_and_kinds_are_those_of_the_code() -> None:
    for name, meaning in {**KINDS, **POINTS}.items():
        assert f"| `{name}` | {meaning} |" in PAGE, name
