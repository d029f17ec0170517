"""`finetrainers plot` draws what a run has recorded, and says what is wrong with a directory that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from finetrainers.cli.main import main


def write(directory: Path, *records: dict[str, float]) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def test_a_panel_for_each_kind_of_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = [{"time": 100.0 + i, "step": i, "loss": 1.0 / (i + 1), "lr": 1e-3} for i in range(4)]
    scored = [{**r, "reward/a": r["step"] / 4, "group_std/a": 0.1, "kl": 0.1 * r["step"]} for r in plain]
    assert main(["plot", str(write(tmp_path / "sft", *plain)), str(write(tmp_path / "grpo", *scored))]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / name / "curves.png") for name in ("sft", "grpo")]
    heights = [Image.open(tmp_path / name / "curves.png").height for name in ("sft", "grpo")]
    assert heights == [330, 990]  # loss and rate in one row; with reward, by time, kl, and reward by kl in three


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write(tmp_path / "empty")
    assert main(["plot", str(tmp_path / "none"), str(empty)]) == 2
    said = capsys.readouterr().err
    assert "is no run directory" in said
    assert "has no records to draw yet" in said
