"""The benchmark of reward finetuning runs, chooses rates, and prints what a score has cost. No times are checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.rotating

SMALL = {"sampling_steps": 4, "prompts_per_step": 2, "num_generations": 4, "batch_size": 4}


@pytest.fixture(scope="module")
def benchmark(benchmark_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return benchmark_script("grpo")


@pytest.mark.timeout(180)
def test_settings_train_in_turns(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import grpo_compare
    import grpo_settings

    baseline = {n: v for n, v in grpo_settings.SETTINGS[benchmark.BASELINE].changes.items() if n not in SMALL}
    settings = {
        benchmark.BASELINE: grpo_settings.Contender({**baseline, "best_of_n": 2}, 50, [6e-3]),
        "window, 4 steps": grpo_settings.Contender({"window_size": 1, "window_range": [0.5, 0.75]}, 50),
    }
    task = grpo_settings.Task(settings, ("preferred_color",), 2.0, SMALL, evaluated=4)
    monkeypatch.setitem(benchmark.TASKS, "color", task)
    monkeypatch.setattr(grpo_compare, "TUNING", 1)
    results, written = tmp_path / "results.jsonl", tmp_path / "results.json"
    given = ["--seeds", "5", "--results", str(results), "--write", str(written)]
    with pytest.raises(SystemExit) as ended:
        benchmark.main(given)
    assert ended.value.code == 1
    assert "none of ours" in capsys.readouterr().out
    measured = json.loads(written.read_text())
    # 8 clips of 4 steps, of which 4 are replayed at 1 step; 3 steps of 2 prompts, 1 of 8 clips, and 2 trained inputs.
    assert {row["settings"]: row["per_update"] for row in measured["tasks"]["color"]["rows"]} == {
        benchmark.BASELINE: 8 * 4 + 4 * 1 * 3,
        "window, 4 steps": 2 * 3 + 8 + 2 * 3,
    }
    assert sorted(run["ended"] for run in measured["runs"]) == ["limit", "limit", "rate"]

    # What is finished is read, not measured again.
    found = results.read_text()
    with pytest.raises(SystemExit):
        benchmark.main(given)
    assert results.read_text() == found
    assert json.loads(written.read_text())["tasks"] == measured["tasks"]


def curve(*scores: float, passes: float = 1200.0, ended: str = "limit") -> list[Any]:
    """Return evaluations every `passes`, of 10 ms each."""
    from grpo_compare import Cost, Point

    costs = [Cost(passes=passes * step, cpu_s=0.01 * passes * step) for step in range(len(scores))]
    points = [Point(step, cost, score) for step, (cost, score) in enumerate(zip(costs, scores, strict=True))]
    return [*points[:-1], Point(points[-1].step, points[-1].cost, points[-1].score, ended)]


def test_a_rate_that_diverges_on_some_seeds_is_not_chosen(benchmark: ModuleType) -> None:
    """Even where it is ahead after two updates, and reaches the score first with another seed."""
    from grpo_compare import Run, best_rate

    fast = {Run("color", benchmark.BASELINE, 1e-2, 1): curve(0.63, 0.66, 0.71)}
    fast |= {Run("color", benchmark.BASELINE, 1e-2, 2): curve(0.63, 0.64, 0.55)}
    slow = {Run("color", benchmark.BASELINE, 6e-3, seed): curve(0.63, 0.64, 0.65, 0.68, 0.7) for seed in (1, 2)}
    assert best_rate(fast | slow, (1e-2, 6e-3), 0.7) == 6e-3
    slower = {Run("color", benchmark.BASELINE, 3e-3, seed): curve(0.63, 0.64, 0.66, 0.66, 0.69, 0.7) for seed in (1, 2)}
    assert best_rate(slow | slower, (6e-3, 3e-3), 0.7) == 6e-3


def test_costs_are_compared_seed_by_seed(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has not reached the score gives a bound; a file returns what was written to it, once per step."""
    from grpo_compare import Run, cost_until, read_curves, write_point

    curves = {
        Run("color", benchmark.BASELINE, 6e-3, 1): curve(0.63, 0.65, 0.75),
        Run("color", benchmark.BASELINE, 6e-3, 2): curve(0.63, 0.64, 0.66),
        **{Run("color", "window, 4 steps", 6e-3, seed): curve(0.6, 0.7, passes=300, ended="score") for seed in (1, 2)},
    }
    assert cost_until(curves[Run("color", benchmark.BASELINE, 6e-3, 2)], 0.7) is None
    for run, points in curves.items():
        for point in [*points, points[-1]]:
            write_point(tmp_path / "results.jsonl", run, point)
    assert read_curves(tmp_path / "results.jsonl") == curves
    rows = baseline, ours = list(benchmark.make_rows(curves, "color"))
    assert [(round(ratio, 3), exact) for ratio, exact in ours.ratios(baseline, "passes")] == [(6.0, True), (8.0, False)]
    assert (baseline.scores, list(baseline.costs)) == ({1: 0.75, 2: 0.66}, [1])
    assert ours.costs[1].cpu_s == pytest.approx(3.0)
    benchmark.print_table(rows, "color")
    out = capsys.readouterr().out
    assert "| 7.0 (6.0 to 8.0) or more | 7.0 (6.0 to 8.0) or more |" in out
    assert "0.660 after 2400 passes" in out
    assert benchmark._judged(rows)
    assert not benchmark._judged(rows[:1])


def test_every_task_has_settings_of_equal_effort(benchmark: ModuleType) -> None:
    """Baselines have at least as many rates as ours, and more passes."""
    for task in benchmark.TASKS.values():
        baseline, *others = task.settings.values()
        assert all(len(baseline.rates) >= len(other.rates) and baseline.limit >= other.limit for other in others)


def test_most_of_the_saturated_prompts_leave_no_choice(benchmark: ModuleType, tmp_path: Path) -> None:
    captions = benchmark.TASKS["saturated"].prompts(tmp_path).read_text().splitlines()
    assert [" or " in caption for caption in captions] == [True] * 8 + [False] * 24
    assert len(set(captions)) == len(captions)


@pytest.mark.timeout(180)
def test_what_is_not_learned_is_said(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**SMALL, "evaluated": 4, "lr": 1e-6, "train_steps": 1}
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
