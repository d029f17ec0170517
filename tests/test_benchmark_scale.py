"""The simulation of many processes: nothing that a process does in a step, at the start and for a save grows with
them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotating

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scale.py"


def test_nothing_grows_with_the_number_of_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("benchmarks_scale", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, spec.name, module)  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "NUM_CLIPS", 1000)
    monkeypatch.setattr(module, "LEAST_FILE_BYTES", 1 << 20)
    module.main(["--processes", "8", "64", "--depth", "1"])
    table = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    few, many, *groups = ([float(cell) for cell in cells] for cells in table[1:])
    ranks, _, _, gathered, reduced, read, read_before, saved, saved_before = range(9)
    assert [few[ranks], many[ranks]] == [8, 64]
    for name in (gathered, reduced):  # by a ring: (N - 1) / N of the weights, twice, and of the gradients
        assert many[name] == pytest.approx(few[name] * (63 / 64) / (7 / 8), rel=0.02)
    assert few[read_before] == many[read_before] > 6 * few[read]
    assert many[read] < 0.6 * few[read]  # the largest weight alone is half of that
    assert many[saved] < 0.6 * few[saved] < few[saved_before]
    assert groups[0][gathered] == groups[1][gathered]  # of eight each
    assert groups[1][reduced] > groups[0][reduced]  # shards of gradients are averaged between groups, too
