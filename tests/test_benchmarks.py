"""The benchmark runs, and refuses to compare loops that do different work. No times are checked here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from real_process import Python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def overhead(benchmark_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return benchmark_script("overhead")


@pytest.fixture(scope="module")
def startup(benchmark_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return benchmark_script("startup")


@pytest.mark.rotating
@pytest.mark.parametrize("case", ["ltx", "hunyuan", "cogvideo"])
@pytest.mark.rotating
def test_prints_a_row_for_each_run(overhead: ModuleType, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--training", "full-finetune", "--blocks", "1", "--steps", "1"]
    overhead.main(["--cases", case, "--data", "memory", "cache", *shape])
    out = capsys.readouterr().out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith(f"| {case} ")]
    assert [row[3] for row in rows] == ["memory", "cache"]
    for row in rows:
        toolkit, bare, ratio, least, most, cpu_ratio = map(float, row[4:10])
        assert min(toolkit, bare, ratio, cpu_ratio) > 0
        assert least == ratio == most  # of one pair of blocks
    assert re.search(r"worst .* memory: \d", out)
    assert "torch" in out.splitlines()[0]


@pytest.mark.rotating
def test_adapters_and_bf16_do_the_same_work_too(overhead: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(["--cases", "cogvideo", "--training", "lora", "--precision", "bf16", "--blocks", "1", "--steps", "1"])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| cogvideo | lora | bf16 |"))
    assert float(row.strip("| ").split(" | ")[-1]) < 1e-2


@pytest.mark.rotating
def test_loops_that_do_different_work_are_not_compared(overhead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = overhead.draw

    def other_noise(*arguments: object) -> object:
        prepared = honest(*arguments)
        return replace(prepared, eps=prepared.eps.flip(0))

    monkeypatch.setattr(overhead, "draw", other_noise)
    with pytest.raises(RuntimeError, match="same work"):
        overhead.main(["--cases", "cogvideo", "--training", "lora", "--blocks", "1", "--steps", "1"])


@pytest.mark.rotating
def test_imports_are_summed_by_package(startup: ModuleType) -> None:
    seconds = dict(startup.import_seconds("import json.tool"))
    assert 0 < seconds["json"] < 10
    assert not any("." in package for package in seconds)


@pytest.mark.rotating
def test_a_command_that_fails_is_an_error(startup: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="unlucky"):
        startup.command_seconds("-c", "raise SystemExit('unlucky')")


@pytest.mark.rotating
def test_start_up_is_measured_each_way(
    startup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "command_seconds", lambda *arguments: 2.0)
    monkeypatch.setattr(startup, "first_step_seconds", lambda *arguments, precompute: 4.0 if precompute else 3.0)
    monkeypatch.setattr(startup, "import_seconds", lambda statement: [("torch", 1.5), ("finetrainers", 0.25)])
    assert startup.main(["--repeats", "2"]) == 0
    out = capsys.readouterr().out
    assert "| `train.py --help` | 2.00 | 2.00 | 2.00 |" in out
    assert "| first step logged | 3.00 | 3.00 | 3.00 |" in out
    assert "| first step logged, precomputed before | 4.00 | 4.00 | 4.00 |" in out
    assert "| finetrainers | 0.25 |\n| all | 1.75 |" in out


@pytest.mark.rotating
def test_the_first_step_of_a_real_run(
    startup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Python
) -> None:
    def run(command: list[str]) -> None:
        process = python(*command[1:])
        assert process.wait() == 0, process.stderr

    monkeypatch.setattr(startup, "_run", run)
    case = startup.CASES["ltx"]
    case.build(tmp_path)
    assert 0 < startup.first_step_seconds(case, tmp_path, precompute=True) < 600
    assert (tmp_path / "run" / "pytorch_lora_weights.safetensors").is_file()
    assert list((tmp_path / "cache").iterdir())


def test_every_script_imports_what_it_uses(benchmark_script: Callable[[str], ModuleType]) -> None:
    """Their own tests rotate; a name that the package has no longer is noticed every day."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert len(names) > 15
    for name in names:
        assert benchmark_script(name).__doc__
