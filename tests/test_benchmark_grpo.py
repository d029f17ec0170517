"""The benchmark of reward finetuning runs and prints its tables. No times are checked here."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

SMALL = {"sampling_steps": 4, "prompts_per_step": 2, "num_generations": 4, "batch_size": 4}


@pytest.fixture(scope="module")
def benchmark(benchmark_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return benchmark_script("grpo")


@pytest.mark.timeout(180)
def test_both_settings_train_in_turns(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "_BOTH", {**benchmark._BOTH, **SMALL, "evaluated": 4})
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


@pytest.mark.timeout(180)
def test_what_is_not_learned_is_said(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**SMALL, "lr": 1e-6, "train_steps": 1}
    monkeypatch.setattr(benchmark, "ALGORITHMS", {"window": {"LoRA": small, "full": small}})
    monkeypatch.setattr(benchmark, "_CAPTIONS", 4)
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--learning", "--algorithms", "window"])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert [line.split(" | ")[1:3] for line in out.splitlines() if line.startswith("| window")] == [
        ["LoRA", "1"],
        ["full", "1"],
    ]
    assert "4 held-out captions" in out
    assert "missed" in out
