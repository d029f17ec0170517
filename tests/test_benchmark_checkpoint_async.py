"""The benchmark of saves in the background runs, and refuses to compare saves that differ. No times are checked
here."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.rotating

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "checkpoint_async.py"
SMALL = ["--layers", "2", "--width", "64", "--rounds", "2", "--steps", "2"]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script as a module."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("benchmarks_checkpoint_async", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


def test_prints_both_ways(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main([*SMALL, "--directory", str(tmp_path)])
    out = capsys.readouterr().out
    times = {way: float(re.search(rf"\| {way} \| ([0-9.]+) ", out)[1]) for way in ("at once", "background")}  # type: ignore[index]
    assert min(times.values()) > 0
    assert re.search(r"training .* \d+\.\d% of ", out)
    assert "| alone | 4 |" in out
    assert "| while the state is copied | 2 |" in out


def test_saves_that_differ_are_not_compared(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = benchmark.read_manifest

    def damaged(directory: Path) -> dict[str, Any]:
        said = read(directory)
        return json.loads(json.dumps(said).replace('"sha256": "', f'"sha256": "{directory.parents[1].name} '))

    monkeypatch.setattr(benchmark, "read_manifest", damaged)
    with pytest.raises(RuntimeError, match="checkpoints differ"):
        benchmark.main([*SMALL, "--directory", str(tmp_path)])
