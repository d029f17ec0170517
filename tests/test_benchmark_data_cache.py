"""The benchmark of the cache runs. No times are checked here."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest

pytestmark = pytest.mark.rotating


def test_prints_both_tables(
    benchmark_script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    script = benchmark_script("data_cache")
    waits = []

    def measured(directory: Path, **options: object) -> object:
        waits.append(options)
        return script.Waits([0.001, 0.003], [0.1, 0.1])

    monkeypatch.setattr(script, "measure_waits", measured)
    assert script.main(["--wait", "--clips", "1"]) == 1  # 2 % is not less than 2 %
    out = capsys.readouterr().out
    assert "| from the cache | 2 | 100.0 | 2.00 | 3.00 | 2.00% |" in out
    assert len(waits) == 4

    monkeypatch.setattr(
        script.time, "sleep", lambda _: monkeypatch.setattr("finetrainers.data.inspect.file_facts._SETTLED_S", -1.0)
    )
    monkeypatch.setattr(script.subprocess, "run", run_here)
    rows = script.startup_table(tmp_path, entries=20)
    assert [len(row.split("|")) for row in rows] == [5] * 6
    assert all(re.fullmatch(r"\| .*20 .*\| \d+\.\d\d \| -?\d+ \|", rows[k]) for k in (2, 4, 5))


def run_here(command: list[str], **_: object) -> object:
    """The program in this process: what it prints."""
    printed = io.StringIO()
    with patch.object(sys, "argv", command[2:]), contextlib.redirect_stdout(printed):
        exec(compile(command[2], "start", "exec"), {"__name__": "__main__"})
    return SimpleNamespace(stdout=printed.getvalue())
