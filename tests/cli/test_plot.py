"""`finetrainers plot` draws what a run has recorded, and says what is wrong with a directory that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from finetrainers.cli.main import main
from finetrainers.utils.curves import draw


def write(directory: Path, *records: dict[str, float]) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


PLAIN = [{"time": 100.0 + 60 * i, "step": i, "loss": 1.0 / (i + 1), "lr": 1e-3} for i in range(4)]
SCORED = [{**r, "reward/a": r["step"] / 4, "group_std/a": 0.1, "kl": 0.5 * r["step"]} for r in PLAIN]


def test_a_panel_for_each_kind_of_number() -> None:
    figure = draw(SCORED)
    assert figure is not None
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == [
        "training loss",
        "reward of rollouts, and the spread within groups",
        "reward of rollouts by time",
        "distance from the model before training",
        "reward and that distance",
        "learning rate",
    ]
    by_title = {title: axes.lines[-1].get_xydata().tolist() for title, axes in panels.items()}
    assert by_title["reward and that distance"] == [[0.0, 0.0], [0.5, 0.25], [1.0, 0.5], [1.5, 0.75]]
    assert by_title["reward of rollouts by time"] == [[0.0, 0.0], [1.0, 0.25], [2.0, 0.5], [3.0, 0.75]]
    assert by_title["learning rate"] == [[float(i), 1e-3] for i in range(4)]
    spread = panels["reward of rollouts, and the spread within groups"].collections[0].get_paths()[0].vertices[:, 1]
    assert (spread.min(), spread.max()) == pytest.approx((-0.1, 0.85))


def test_a_picture_for_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(write(tmp_path / "sft", *PLAIN)), str(write(tmp_path / "grpo", *SCORED))]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / name / "curves.png") for name in ("sft", "grpo")]
    heights = [Image.open(tmp_path / name / "curves.png").height for name in ("sft", "grpo")]
    assert heights == [330, 990]  # loss and rate in one row; with reward, by time, kl, and reward by kl in three


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write(tmp_path / "empty")
    assert main(["plot", str(tmp_path / "none"), str(empty)]) == 2
    said = capsys.readouterr().err
    assert "is no run directory" in said
    assert "has no records to draw yet" in said
