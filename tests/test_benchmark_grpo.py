"""The benchmark of reward finetuning runs, and prints what it measured. No times are checked here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.rotating

SMALL = {"sampling_steps": 4, "prompts_per_step": 2, "num_generations": 4, "batch_size": 4, "evaluated": 4}


@pytest.fixture(scope="module")
def benchmark(benchmark_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return benchmark_script("grpo")


@pytest.mark.timeout(180)
def test_settings_train_in_turns(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "ALL", {**benchmark.ALL, **SMALL})
    small = {
        name: {option: value for option, value in benchmark.SETTINGS[name].items() if option not in SMALL}
        for name in (benchmark.BASELINE, "third of 4 steps")
    }
    small[benchmark.BASELINE] |= {"best_of_n": 2, "num_generations": None, "sampling_steps": None} | SMALL
    monkeypatch.setattr(benchmark, "SETTINGS", small)
    results = tmp_path / "results.jsonl"
    given = ["--seeds", "5", "--score", "2", "--every", "50", "--limit", "50", "--results", str(results)]
    with pytest.raises(SystemExit) as ended:
        benchmark.main(given)
    assert ended.value.code == 1
    out = capsys.readouterr().out
    rows = {
        line.strip("| ").split(" | ")[0]: line.strip("| ").split(" | ")
        for line in out.splitlines()
        if " of 1 |" in line
    }
    # 8 clips of 4 steps, of which 4 are replayed at 1 step; 3 steps of 2 prompts, 1 of 8 clips, and 2 trained inputs.
    assert {name: float(row[6]) for name, row in rows.items()} == {
        benchmark.BASELINE: 8 * 4 + 4 * 1 * 3,
        "third of 4 steps": 2 * 3 + 8 + 2 * 3,
    }
    assert all(row[1] == "0 of 1" and 0 < float(row[7].strip("%")) < 100 for row in rows.values())
    assert "none of ours" in out

    # What is finished is read, not measured again.
    found = results.read_text()
    assert [line.count('"limit"') for line in found.splitlines()] == [0, 0, 1, 1]
    with pytest.raises(SystemExit):
        benchmark.main(given)
    assert results.read_text() == found
    assert "update" not in capsys.readouterr().out.partition("|")[0]


def point(benchmark: ModuleType, name: str, seed: int, passes: float, score: float, ended: str = "") -> object:
    cost = benchmark.Cost(passes=passes, cpu_s=passes / 10, wall_s=passes / 5, network_s=passes / 10)
    return benchmark.Point(name, seed, int(passes), cost, score, ended)


def test_the_crossing_is_between_two_evaluations(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    points = []
    for seed, (ours, theirs) in enumerate([(100, 400), (200, 500), (100, 100)]):
        for name, needed in (("window", ours), (benchmark.BASELINE, theirs)):
            points += [point(benchmark, name, seed, 0, 0.6), point(benchmark, name, seed, 2 * needed, 0.8, "score")]
    ratios = benchmark.report(points, ["window", benchmark.BASELINE], score=0.7, baseline=benchmark.BASELINE)
    assert ratios["window"] == pytest.approx({"passes": 2.5, "cpu_s": 2.5, "wall_s": 2.5})
    out = capsys.readouterr().out
    assert "| window | 3 of 3 | 100 (100 to 200) | 10 (10 to 20) | 20 (20 to 40) |" in out
    assert "with seed" not in out
    points[3] = point(benchmark, benchmark.BASELINE, 0, 900, 0.65, "limit")
    ratios = benchmark.report(points, ["window", benchmark.BASELINE], score=0.7, baseline=benchmark.BASELINE)
    assert ratios.keys() == {"window"}
    assert ratios["window"] == pytest.approx({"passes": 2.5, "cpu_s": 2.5, "wall_s": 2.5})  # the median of 9, 2.5 and 1
    out = capsys.readouterr().out
    assert "with seed 0: " in out
    assert f"| {benchmark.BASELINE} | 2 of 3 | 500 (100 to 900) |" in out
    assert not benchmark._judged(ratios)
    assert benchmark._judged({"window": {"passes": 3.1, "cpu_s": 3.0, "wall_s": 4.0}, "NFT": {"passes": 1.0}})
    assert not benchmark._judged({"window": {"passes": 3.1, "cpu_s": 2.9}})


def test_most_of_the_saturated_prompts_leave_no_choice(benchmark: ModuleType, tmp_path: Path) -> None:
    captions = benchmark.saturated_prompts(tmp_path).read_text().splitlines()
    assert [" or " in caption for caption in captions] == [True] * 8 + [False] * 24
    assert len(set(captions)) == len(captions)


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
