"""The benchmark of memory runs, continues, and writes nothing that it did not measure. No figures are checked here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.rotating


@pytest.fixture(scope="module")
def script(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("memory")


def cells(out: str) -> dict[str, dict[str, str]]:
    """The printed table, by case and heading."""
    heads, _, *lines = (
        [cell.strip() for cell in line[1:-1].split("|")] for line in out.splitlines() if line[:1] == "|"
    )
    return {line[0]: dict(zip(heads, line, strict=True)) for line in lines}


def test_cases_run_once_and_are_not_measured_without_a_gpu(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    given = ["--tiny", "--results", str(file), "--only"]
    assert script.main([*given, "hunyuan-lora-24gb"]) == 0
    assert list(json.loads(file.read_text())) == ["hunyuan-lora-24gb"]
    capsys.readouterr()
    ran, run_case = [], script.run_case
    monkeypatch.setattr(script, "run_case", lambda name, **options: ran.append(name) or run_case(name, **options))
    assert script.main([*given, "24gb", "--count"]) == 0
    assert ran == ["hunyuan-lora-int8-24gb"]
    found = cells(capsys.readouterr().out)
    assert list(found) == ["hunyuan-lora-24gb", "hunyuan-lora-int8-24gb"]
    if not torch.cuda.is_available():
        for row in found.values():
            assert row["note"] == "no GPU"
            assert row["plan"]
            assert not any(row[name] for name in ("measured", "reserved", "plan / measured", "s/step", "MFU"))
    assert script.main([*given, "ltx", "--minutes", "-1"]) == 0
    assert "ltx-lora, ltx-full; " in capsys.readouterr().out


def test_a_measured_case_is_a_row(script: Any) -> None:
    measured = {
        "planned": 20.0, "size": "49x480x720", "counted": 19.5, "allocated": 16.0, "reserved": 18.0, "step_s": 2.5,
        "mfu": 0.4,
    }  # fmt: skip
    row = cells(script.table({"cogvideox-5b-lora": measured}))["cogvideox-5b-lora"]
    assert (row["plan"], row["counted"], row["measured"], row["reserved"]) == ("20.0", "19.5", "16.0", "18.0")
    assert (row["plan / measured"], row["s/step"], row["MFU"], row["published"]) == ("1.25", "2.50", "0.40", "20.8")


@pytest.mark.parametrize("name", ["hunyuan-lora-24gb", "hunyuan-full-80gb"])
def test_cases_for_a_card_fit_it_by_the_estimate(name: str, script: Any, tmp_path: Path) -> None:
    case = script.CASES[name]
    assert 0 < script.StepTimer(case, tmp_path, tiny=False).planned() < case.card_gb * 1e9 / 2**30


def test_a_case_that_fails_is_a_note(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {
        "torch.OutOfMemoryError: CUDA out of memory": "out of memory",
        "ValueError: no": "failed: ValueError: no",
    }
    for said, expected in failures.items():
        done = SimpleNamespace(returncode=1, stderr=f"loading\n{said}\n")
        monkeypatch.setattr(script.subprocess, "run", lambda *_, done=done, **__: done)
        assert script.in_process("ltx-lora", count=False) == {"note": expected}
