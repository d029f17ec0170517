"""The jobs for one GPU, rehearsed at toy size, and the page that they write. No figures are checked here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

#: Parts of the rehearsal; every run of the suite has one.
PARTS = 10
#: Note of a job that runs out of memory.
OOM = "failed: out of memory"


@pytest.fixture(scope="module")
def script(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("gpu")


@pytest.fixture
def rehearse(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], str]]:
    """`rehearse(jobs)`: results by job and the page, of the tiny forms."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def rehearse(jobs: list[str]) -> tuple[dict[str, Any], str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script, "JOBS", {name: script.JOBS[name] for name in jobs})
            assert script.main(["--tiny", "--results", str(tmp_path / "results.json")]) == 0
        return json.loads((tmp_path / "results.json").read_text()), (tmp_path / "results.md").read_text()

    return rehearse


def cells(page: str) -> dict[str, dict[str, str]]:
    """The rows of all tables of a page, by their first cell; cells by heading."""
    rows, headings = {}, []
    for line in page.splitlines():
        row = [cell.strip() for cell in line[1:-1].split("|")] if line[:1] == "|" else []
        if not row:
            headings = []
        elif not headings:
            headings = row
        elif not row[0].startswith("---"):
            rows[row[0]] = dict(zip(headings, row, strict=True))
    return rows


def test_the_plan_takes_25_minutes_and_has_every_option(script: Any) -> None:
    assert sum(job.seconds for job in script.JOBS.values()) <= 25 * 60
    assert max(job.seconds for job in script.JOBS.values()) <= 9 * 60
    options = {option for name in script.JOBS for option in [name.partition("-")[2]]}
    assert options >= set(script._OPTIONS)


def test_ceilings_are_lines_of_the_page(rehearse: Any) -> None:
    results, page = rehearse(["ceilings"])
    assert "note" not in results["ceilings"]
    rows = cells(page)
    assert float(rows["matrix product, TFLOP/s"]["measured"]) > 0
    assert len([name for name in rows if name.startswith("copy ")]) == 3
    assert {row["kernel"] for row in rows.values() if "kernel" in row} <= {"default", "cudnn", "flash", "efficient"}
    assert float(results["ceilings"]["attention"][0]["backward"]) > 0


def test_outcomes_of_tests_are_lines_of_the_page(script: Any, rehearse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form that runs on a GPU: those of times by themselves."""
    commands: list[list[str]] = []
    out = "..F\nFAILED tests/gpu/test_a.py::test_b - assert 0\n2 passed, 1 failed in 3.20s\n"

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(stdout=out if len(commands) == 1 else "1 passed in 1.00s", stderr="")

    monkeypatch.setattr(script.subprocess, "run", run)
    full = script.Job(1, lambda _: script.run_tests(False), "tests")
    monkeypatch.setitem(script.JOBS, "tests", full)
    _, page = rehearse(["tests"])
    lines = ["* 2 passed, 1 failed in 3.20s", "* 1 passed in 1.00s", "* FAILED tests/gpu/test_a.py::test_b - assert 0"]
    assert set(lines) <= set(page.splitlines())
    root = Path(script.ROOT)
    timed = [argument for argument in commands[1] if argument.startswith("tests/")]
    assert timed == [commands[0][at + 1] for at, argument in enumerate(commands[0]) if argument == "--deselect"]
    for file, _, test in (argument.partition("::") for argument in timed):
        assert f"def {test}" in (root / file).read_text()


@pytest.mark.rotating
@pytest.mark.timeout(180)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_job_is_a_line_of_the_page(part: int, script: Any, rehearse: Any) -> None:
    jobs = [name for name, job in script.JOBS.items() if job.kind in ("steps", "runs")][part::PARTS]
    results, page = rehearse(jobs)
    assert list(results) == jobs
    assert {name: found["note"] for name, found in results.items() if found.get("note", "no GPU") != "no GPU"} == {}
    rows = cells(page)
    for name in jobs:
        kind = script.JOBS[name].kind
        if kind == "steps":
            assert float(rows[name]["s/step"]) > 0
            assert rows[name]["planned"]
            assert bool(rows[name]["allocated"]) == torch.cuda.is_available()
        else:
            assert f"`{name}`, 9x64x64: s/step" in page
            is_sampled = name == "run-ltx-grpo"
            assert all(float(rows[phase]["host, measured"]) > 0 for phase in ("loading", "training_step"))
            assert ("rollout" in rows) == is_sampled
            assert ("Self CPU" in page) == (not is_sampled)


def test_calls_go_on_where_the_last_one_ended(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a stand-in for a GPU: jobs begin that have enough time, what another device measured is repeated."""
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    command = ["--results", str(results), "--page", str(page), "--only", "ltx", "--minutes"]
    assert script.main([*command, "9"]) == (0 if torch.cuda.is_available() else 2)
    here = {"device": "Stand-in 80", "torch": "2.11.0", "CUDA": "13.0", "cuDNN": "91500"}
    names: list[str] = []

    def measure_alone(name: str, *, limit_s: float) -> Any:
        assert limit_s >= script.JOBS[name].seconds
        names.append(name)
        if name == "ltx-flash":
            return {"note": OOM}
        figures = {"planned": 5.0, "allocated": 4.0, "reserved": 4.5, "step_s": 0.5 if names[1:] else 0.25, "mfu": 0.2}
        return figures | {"size": "49x512x768"} if script.JOBS[name].kind == "steps" else {"note": "failed: no"}

    monkeypatch.setattr(script, "machine", lambda: here)
    monkeypatch.setattr(script, "_device", lambda: "cuda")
    monkeypatch.setattr(script, "measure_alone", measure_alone)
    assert script.main([*command, "0.45"]) == 0  # 27 seconds
    assert "ltx-checkpoint" not in names
    assert "ltx-checkpoint" in capsys.readouterr().out
    first = list(names)
    assert script.main([*command, "9"]) == 0
    assert sorted(names) == sorted(name for name in script.JOBS if "ltx" in name)
    assert not set(first) & set(names[len(first) :])
    rows, text = cells(page.read_text()), page.read_text()
    assert text.startswith("# Measured on Stand-in 80\n")
    assert all(version in text for version in ("torch 2.11.0", "CUDA 13.0", "cuDNN 91500"))
    assert rows["ltx-checkpoint"]["planned / allocated"] == "1.25"
    assert rows["ltx-checkpoint"]["MFU"] == "0.200"
    assert rows["ltx-compile"]["relative"] == "1.00"
    assert f"* `ltx-flash`: {OOM}" in text.splitlines()
    done = len(names)
    here = {**here, "torch": "2.13.0"}
    assert script.main([*command, "9"]) == 0
    assert len(names) == 2 * done


def test_a_job_that_fails_or_hangs_leaves_a_note(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: bool) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setitem(script.JOBS, "ltx-nf4", script.Job(1, fail, "steps"))
    assert script.measure("ltx-nf4", tiny=False) == {"note": OOM}

    def hang(command: list[str], *, timeout: float, **_: Any) -> Any:
        raise script.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(script.subprocess, "run", hang)
    assert "3 s" in script.measure_alone("ltx-nf4", limit_s=100)["note"]
    assert script.measure_alone("ltx-nf4", limit_s=2) is None  # it is repeated by the next command
