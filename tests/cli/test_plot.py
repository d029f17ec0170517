"""`finetrainers plot` draws what a run has recorded, and says what is wrong with a directory that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import refused_command

from finetrainers.cli.main import main
from finetrainers.draw.curves import Marks, draw, marks_of, plot_run, read_metrics
from finetrainers.draw.sample_files import video_sheet
from finetrainers.utils.video import write_mp4


def write(directory: Path, *records: dict[str, float]) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


PLAIN = [{"time": 100.0 + 60 * i, "step": i, "loss": 1.0 / (i + 1), "lr": 1e-3, "grad_norm": 1.0 + i} for i in range(4)]
SCORED = [
    {**r, "reward/a": r["step"] / 4, "group_std/a": 0.1, "kl": 0.5 * r["step"], "constant_groups": 0.0,
     "gradient/low": 0.0, "gradient/high": 1.0 + r["step"]}
    for r in PLAIN
]  # fmt: skip
EVALUATED = [*PLAIN, {"step": 0, "eval_loss": 2.0}, {"step": 3, "eval_loss": 1.0}]


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_a_panel_for_each_kind_of_number_what_matters_first() -> None:
    figure = draw(SCORED)
    assert titles(figure) == [
        "Reward of rollouts: a (smoothed; band: std within groups)",
        "KL divergence from the reference model (smoothed)",
        "Reward over KL divergence",
        "Gradient norm by noise level",
        "Gradient norm",
        "Training loss (smoothed)",
    ]
    panels = dict(zip(titles(figure), figure.axes, strict=True))
    by_title = {title: axes.lines[-1].get_xydata().tolist() for title, axes in panels.items()}
    assert by_title["Reward over KL divergence"] == [[0.0, 0.0], [0.5, 0.25], [1.0, 0.5], [1.5, 0.75]]
    assert by_title["Gradient norm"] == [[float(i), 1.0 + i] for i in range(4)]
    spread = panels[titles(figure)[0]].collections[0].get_paths()[0].vertices[:, 1]
    assert (spread.min(), spread.max()) == pytest.approx((-0.1, 0.85))
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.get_legend() is not None] == [
        "Gradient norm by noise level"
    ]
    assert titles(draw(EVALUATED)) == ["Held-out loss", "Training loss (smoothed)", "Gradient norm"]


def test_each_reward_has_a_panel_with_its_held_out_prompts() -> None:
    """Rewards have scales of their own; seconds are named by what takes them."""
    records = [
        {**r, "reward/b": 10.0 * r["step"], "step_s": 2.0 + r["step"], "seconds/data": 0.1 * r["step"]} for r in SCORED
    ]
    figure = draw(
        [*records, {"step": 0, "eval_reward/a": 0.1}, {"step": 3, "eval_reward/a": 0.4, "eval_reward/c": 2.0}]
    )
    legends = {
        axes.get_title(loc="left"): [text.get_text() for text in axes.get_legend().get_texts()]
        for axes in figure.axes
        if axes.get_legend() is not None
    }
    assert legends["Reward: a (smoothed; band: std within groups)"] == ["rollouts", "held-out prompts"]
    assert legends["Time per step (s)"] == ["step", "waiting for data"]
    assert titles(figure)[1:3] == [
        "Reward of rollouts: b (smoothed; band: std within groups)",
        "Reward of held-out prompts: c",
    ]
    assert figure.axes[0].lines[-1].get_xydata().tolist() == [[0.0, 0.1], [3.0, 0.4]]


def test_preferences_are_judged_by_what_pairs_have_gained() -> None:
    """What docs/how-to/dpo.md says to watch has a panel, before the loss."""
    pairs = [
        {**r, "accuracy": r["step"] / 4, "gain_chosen": -r["step"], "gain_rejected": -2 * r["step"]} for r in PLAIN
    ]
    figure = draw(pairs)
    assert titles(figure) == [
        "Preference accuracy on pairs (share)",
        "Error reduction against the reference model",
        "Training loss (smoothed)",
        "Gradient norm",
    ]
    drawn = [[line.get_ydata()[-1] for line in axes.lines] for axes in figure.axes[:2]]
    assert drawn == [[0.75], [-3.0, -6.0]]


def test_a_moving_average_and_what_does_not_change() -> None:
    """Numbers that are always the same have no panel, and are named below."""
    figure = draw(SCORED)
    assert figure.get_supxlabel() == "constant: lr 0.001, constant_groups 0, gradient/low 0"
    mean, raw = figure.axes[-1].lines
    assert mean.get_ydata().tolist() == pytest.approx([3 / 4, 11 / 18, 13 / 36, 7 / 24])
    assert raw.get_ydata().tolist() == [1, 1 / 2, 1 / 3, 1 / 4]
    assert draw([{"step": 1, "loss": 1.0}]) is not None, "one record does not show that a number never changes"


def test_resumes_and_samples_are_marked(tmp_path: Path) -> None:
    run = write(tmp_path / "run", *EVALUATED)
    events = [
        {"event": "start", "step": 0},
        {"event": "samples", "step": 2},
        {"event": "start", "step": 2},
        {"event": "start", "step": 9},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"cut')
    (run / "metrics.jsonl").open("a").write('{"step": 4, "lo')
    plot_run(run)
    figure = draw(EVALUATED, Marks(resumed=[2.0, 9.0], sampled=[2.0]))
    assert figure.get_supxlabel() == "constant: lr 0.001;  dashed: resumed;  triangles: samples"
    for axes in figure.axes:
        line, triangles = axes.lines[-2:]
        assert line.get_xdata() == [2.0, 2.0]
        assert (triangles.get_marker(), list(triangles.get_xdata())) == ("^", [2.0])


def test_a_picture_for_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(write(tmp_path / "sft", *PLAIN)), str(write(tmp_path / "grpo", *SCORED))]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / name / "curves.png") for name in ("sft", "grpo")]
    sizes = [Image.open(tmp_path / name / "curves.png").size for name in ("sft", "grpo")]
    assert sizes[0][0] == sizes[1][0]
    assert 2.7 < sizes[1][1] / sizes[0][1] < 3  # loss and norm in one row; with rewards three


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write(tmp_path / "empty")
    code, found = refused_command(["plot", tmp_path / "none", empty])
    assert (code, [place for place, _ in found]) == (2, ["RUN", "RUN"])
    said = capsys.readouterr().err
    assert str(tmp_path / "none") in said
    assert str(empty) in said


def test_kept_rollouts_and_reward_hacking_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best clip above the worst one, of six rollouts at most; a run without KL has no panel over it."""
    run = write(tmp_path / "run", *({k: v for k, v in record.items() if k != "kl"} for record in SCORED))
    (run / "events.jsonl").write_text('{"event": "reward_hacking", "step": 2}\n')
    for step in range(1, 9):
        for kind in ("best", "worst"):
            clip = np.full((9, 32, 32, 3), 20 * step, dtype=np.uint8)
            write_mp4(run / "rollouts" / f"step-{step:06d}" / f"{kind}.mp4", clip, fps=8.0, comment=f"a\n{kind}")
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "curves.png"), str(run / "rollouts.png")]
    sheet = Image.open(run / "rollouts.png")
    of_one = video_sheet([run / "rollouts" / "step-000001" / f"{kind}.mp4" for kind in ("best", "worst")])
    assert 5 < sheet.height / of_one.height < 6.1
    figure = draw(read_metrics(run / "metrics.jsonl"), marks_of([{"event": "reward_hacking", "step": 2}]))
    assert "Reward over KL divergence" not in titles(figure)
    assert figure.get_supxlabel().endswith("red: reward hacking")
    for axes in figure.axes:
        assert any(list(line.get_xdata()) == [2.0, 2.0] and line.get_color() == "tab:red" for line in axes.lines)
