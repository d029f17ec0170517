"""The benchmark of reward finetuning runs and prints its tables. No times are checked here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "grpo.py"
SMALL = {"sampling_steps": 4, "prompts_per_step": 2, "num_generations": 4, "batch_size": 4}


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script as a module."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("benchmarks_grpo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.path[:] = path


@pytest.mark.timeout(180)
def test_both_settings_train_in_turns(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "_BOTH", {**benchmark._BOTH, **SMALL})
    benchmark.main(["--score", "2", "--every", "2", "--limit_s", "0"])
    out = capsys.readouterr().out
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")
        for line in out.splitlines()
        if " not within " in line
    }
    assert set(rows) == {"default", "dancegrpo"}
    # 8 clips x (4 sampled steps + 2 trained ones x 3), of all clips; 8 clips x (4 + 1 x 3) in two updates, of all clips.
    assert {name: float(row[4]) for name, row in rows.items()} == {"default": 80.0, "dancegrpo": 28.0}
    assert all(0 < float(row[5].strip("% |")) < 100 for row in rows.values())
