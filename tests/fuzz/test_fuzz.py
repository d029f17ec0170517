"""A short run of every target, equal each time, and what a target does with inputs that crash."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from real_process import Python

from finetrainers.utils.failures import InputError
from tests.fuzz import harness
from tests.fuzz.harness import Case, run_target

#: Damaged files of each target.
COUNTS = {"headers": 40, "manifests": 8, "ledgers": 10, "records": 12, "configuration": 24, "media": 140, "tables": 90}
#: Targets that are read whatever is in them: checkpoints and records stop nothing.
TOLERANT = ("manifests", "ledgers", "records")


def test_every_damaged_file_is_usable_or_refused_with_a_reason(python: Python, tmp_path: Path) -> None:
    counts = [argument for name, count in COUNTS.items() for argument in ("--target", f"{name}={count}")]
    process = python("-m", "tests.fuzz", "--json", "--directory", str(tmp_path / "fuzz"), *counts)
    code = process.wait(timeout=300)
    reports = json.loads(process.stdout)
    crashes = [crash for report in reports for crash in report["crashes"]]
    assert (code, crashes) == (0, []), process.stderr[-2000:]
    for report in reports:
        assert report["inputs"] == COUNTS[report["target"]]
        outcomes = {case.rpartition(": ")[2] for case in report["outcomes"]}
        # Files are damaged in every place: some are usable all the same, and some are not.
        assert outcomes == {"usable", "refused"} or report["target"] in TOLERANT, report["target"]
        assert "usable" in outcomes


def read(path: Path) -> None:
    """Read a file in the way that its name says, unless it is whole."""
    content = path.read_bytes()
    if content == b"as it was":
        return
    if path.name in ("refused", "silent"):
        raise InputError("it is damaged" if path.name == "refused" else "")
    if path.name == "large":
        bytes(1 << 29)
    while path.name == "endless":
        pass
    if path.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError(path.name)


def make(names: Sequence[str], directory: Path) -> list[Case]:
    for name in names:
        (directory / name).write_bytes(b"as it was")
    return [Case(name, directory / name, partial(read, directory / name)) for name in names]


def test_crashes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "CPU_S", 0.1)
    monkeypatch.setattr(harness, "MEMORY", 1 << 28)
    cases = partial(make, ("refused", "silent", "large", "endless", "other"))
    report = run_target("one", cases, tmp_path / "a/one", seed=3, seconds=60, count=10)
    again = run_target("one", cases, tmp_path / "b/one", seed=3, seconds=60, count=5)
    assert (report.inputs, report.outcomes) == (10, {"refused: refused": 2})
    kinds = {crash.case: crash.error.partition(" ")[0] for crash in report.crashes}
    assert kinds == {
        "silent": "InputError", "large": "MemoryError", "endless": "TooLongError", "other": "KeyError",
    }  # fmt: skip
    assert report.repeated == 4
    inputs = [[Path(crash.input).read_bytes() for crash in result.crashes] for result in (report, again)]
    assert inputs[0] == inputs[1]
    assert len(set(inputs[0])) > 1


def test_a_process_that_ends_is_reported(tmp_path: Path) -> None:
    cases = partial(make, ("killed",))
    [crash] = run_target("two", cases, tmp_path / "a/two", seed=3, seconds=60).crashes
    content = Path(crash.input).read_bytes()
    assert (crash.error, crash.number, content == b"as it was") == ("SIGKILL", 1, False)
    [crash] = run_target("two", cases, tmp_path / "b/two", seed=0, seconds=60, only=7, content=content).crashes
    assert (crash.error, crash.number) == ("SIGKILL", 7)
