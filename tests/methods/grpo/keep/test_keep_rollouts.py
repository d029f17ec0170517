"""Clips of rollouts that are written with their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_of import OneOf

from finetrainers.config.load import load_config
from finetrainers.methods.grpo.advantage import Advantages
from finetrainers.methods.grpo.keep.keep_rollouts import RolloutKeeper, _select_ranks
from finetrainers.methods.grpo.prompts.prompts import Prompt, RolloutSample
from finetrainers.rewards.reward_set import HeadScores, Scores
from finetrainers.utils.reading import read_jsonl
from finetrainers.utils.video import read_comment, read_mp4

#: Of the first prompt clip 2 is best and 0 worst, since 1 has failed.
VALUES = torch.tensor([[-1.0, 0.0, 2.0], [0.5, -0.5, 0.1]])
FAILED = torch.tensor([[False, True, False], [False] * 3])
FOUND = Advantages(VALUES, VALUES[..., None], {}, constant=(), failed=FAILED)
RAW = torch.tensor([0.25, torch.nan, 0.75, 0.1, 0.2, 0.3], dtype=torch.float64)
SCORES = Scores({"brightness": HeadScores(RAW, RAW)}, FAILED.flatten())


def keeper(root: Path, parallel: Any, **options: Any) -> RolloutKeeper:
    config = load_config(
        method="grpo", model_name="ltx_video", pretrained_model_name_or_path="x", output_dir=str(root),
        updates_per_rollout=2, **{"train_steps": 1, **options},
    )  # fmt: skip
    return RolloutKeeper(config, parallel, fps=8.0)


def test_the_best_and_the_worst_clip_of_the_first_prompt_are_written(tmp_path: Path) -> None:
    """By two ranks, of which one has both; of every third rollout, under its first optimizer step."""
    for rollout in range(4):
        for rank in (0, 1):
            found = keeper(tmp_path, OneOf(rank, 2), keep_rollouts_every=3)
            jobs = [RolloutSample(rollout, rank, Prompt(("a cat", "a dog")[rank], ""), k) for k in range(3)]
            clips = {
                k: torch.full((9, 32, 32, 3), 100 * k, dtype=torch.uint8)
                for k, job in enumerate(jobs)
                if found.wants(job)
            }
            assert len(clips) == (3 if rank == 0 and rollout in (0, 3) else 0)
            found.keep(jobs, clips, SCORES, FOUND)
    root = tmp_path / "rollouts"
    assert sorted(path.name for path in root.iterdir()) == ["pairs.jsonl", "step-000001", "step-000007"]
    folder = root / "step-000007"
    for name, clip, said in (("best", 2, "best of 3 | advantage +2.00"), ("worst", 0, "worst of 3 | advantage -1.00")):
        frames, _ = read_mp4(folder / f"{name}.mp4", columns=1)
        assert abs(float(np.median(frames)) - 100 * clip) < 4
        assert read_comment(folder / f"{name}.mp4") == f"a cat\nrollout 3 | {said} | brightness {RAW[clip]:.4g}"
    assert json.loads((folder / "scores.json").read_text()) == {
        "rollout": 3,
        "prompt": "a cat",
        "best": {"clip": 2, "advantage": 2.0, "reward": {"brightness": 0.75}, "video": "best.mp4"},
        "worst": {"clip": 0, "advantage": -1.0, "reward": {"brightness": 0.25}, "video": "worst.mp4"},
    }


def test_the_only_clip_of_a_prompt_is_compared_with_none(tmp_path: Path) -> None:
    alone = Advantages(torch.zeros(2, 1), torch.zeros(2, 1, 1), {}, constant=(0, 1), failed=torch.zeros(2, 1).bool())
    scores = Scores({"brightness": HeadScores(RAW[3:5], RAW[3:5])}, alone.failed.flatten())
    found = keeper(tmp_path, OneOf(), keep_rollouts_every=1, keep_rollouts=2)
    jobs = [RolloutSample(0, slot, Prompt(text, ""), 0) for slot, text in enumerate(("a cat", "a dog"))]
    found.keep(jobs, dict.fromkeys(range(2), torch.zeros(9, 32, 32, 3, dtype=torch.uint8)), scores, alone)
    folder = tmp_path / "rollouts" / "step-000001"
    assert sorted(path.name for path in folder.glob("*.mp4")) == ["best.mp4", "prompt-01-rank-01.mp4"]
    assert read_comment(folder / "best.mp4") == "a cat\nrollout 0 | brightness 0.1"
    rows, _ = read_jsonl(folder / "clips.jsonl")
    assert [(row["prompt"], row["reward"], "advantage" in row) for row in rows] == [
        ("a cat", {"brightness": 0.1}, False), ("a dog", {"brightness": 0.2}, False)
    ]  # fmt: skip
    assert not (tmp_path / "rollouts" / "pairs.jsonl").exists()


def test_of_several_rewards_each_has_its_best_and_its_worst_clip(tmp_path: Path) -> None:
    """A clip that exists is named, and not written twice; a clip that one reward could not score is neither."""
    other = torch.tensor([0.9, torch.nan, 0.1, 0.1, 0.2, 0.3], dtype=torch.float64)
    third = torch.tensor([torch.nan, torch.nan, 0.5, 0.1, 0.2, 0.3], dtype=torch.float64)
    raws = {"bright": RAW, "demo.shape": other, "c": third}
    scores = Scores({name: HeadScores(raw, raw) for name, raw in raws.items()}, FAILED.flatten())
    one = keeper(tmp_path, OneOf(), keep_rollouts_every=1)
    jobs = [RolloutSample(0, prompt, Prompt(("a cat", "a dog")[prompt], ""), k) for prompt in (0, 1) for k in range(3)]
    clips = {k: torch.full((9, 32, 32, 3), 100 * k, dtype=torch.uint8) for k in range(3)}
    one.keep(jobs, clips, scores, FOUND)
    folder = tmp_path / "rollouts" / "step-000001"
    found = json.loads((folder / "scores.json").read_text())
    clips_by_head = {
        head: {kind: (clip["clip"], clip["video"]) for kind, clip in kinds.items()}
        for head, kinds in found["heads"].items()
    }
    assert clips_by_head == {
        "bright": {"best": (2, "best.mp4"), "worst": (0, "worst.mp4")},
        "demo.shape": {"best": (0, "best-demo-shape.mp4"), "worst": (2, "worst-demo-shape.mp4")},
        "c": {"best": (2, "best.mp4"), "worst": (2, "worst-demo-shape.mp4")},
    }
    names = ["best-demo-shape.mp4", "best.mp4", "worst-demo-shape.mp4", "worst.mp4"]
    assert sorted(path.name for path in folder.glob("*.mp4")) == names
    assert "best of 3 by demo-shape | advantage -1.00 | bright 0.25, demo.shape 0.9" in read_comment(
        folder / "best-demo-shape.mp4"
    )


def test_the_clips_of_every_prompt_are_written_with_all_that_is_known_of_them(tmp_path: Path) -> None:
    """By two ranks; the pairs follow from the files that are there, also after those of later steps were set aside."""
    third = Advantages(VALUES, VALUES[..., None], {}, constant=(), failed=torch.zeros(2, 3, dtype=torch.bool))
    rows: list[Any] = []
    for rollout in (0, 1, 2):
        rows.clear()
        for rank in (1, 0):  # the last one writes the files
            parallel: Any = OneOf(rank, 2)
            parallel.gather_objects = lambda items: rows.extend(items) or list(rows)
            found = keeper(tmp_path, parallel, keep_rollouts=2, keep_rollouts_every=1, init_same_noise=rollout > 0)
            jobs = [RolloutSample(rollout, rank, Prompt(("a cat", "a dog")[rank], ""), k) for k in range(3)]
            assert all(map(found.wants, jobs))
            clips = {k: torch.full((9, 32, 32, 3), 100 * k, dtype=torch.uint8) for k in range(3)}
            found.keep(jobs, clips, SCORES, FOUND if rollout else third)
    folder = tmp_path / "rollouts" / "step-000003"
    names = ["best.mp4", "clips.jsonl", "prompt-01-rank-01.mp4", "prompt-01-rank-03.mp4", "scores.json", "worst.mp4"]
    assert sorted(path.name for path in folder.iterdir()) == names
    kept = read_jsonl(folder / "clips.jsonl")[0]
    assert [(row["prompt"], row["clip"], row["video"]) for row in kept] == [
        ("a cat", 0, "worst.mp4"), ("a cat", 2, "best.mp4"),
        ("a dog", 0, "prompt-01-rank-01.mp4"), ("a dog", 1, "prompt-01-rank-03.mp4"),
    ]  # fmt: skip
    jobs = [RolloutSample(1, 1, Prompt("a dog", ""), k) for k in range(3)]
    assert kept[3] == {
        "rollout": 1, "step": 3, "slot": 1, "prompt": "a dog", "clip": 1, "video": "prompt-01-rank-03.mp4",
        "seed": jobs[1].noise_seed(42, "start", per_group=True), "reward": {"brightness": 0.2}, "advantage": -0.5,
    }  # fmt: skip
    drawn = torch.randn(5, generator=torch.Generator().manual_seed(kept[3]["seed"]))
    assert torch.equal(drawn, torch.randn(5, generator=jobs[0].generator(42, "start", per_group=True)))
    assert kept[2]["seed"] == kept[3]["seed"]  # both start from the same noise
    first = read_jsonl(tmp_path / "rollouts" / "step-000001" / "clips.jsonl")[0]
    assert len({row["seed"] for row in first}) == 4
    assert read_comment(folder / "prompt-01-rank-03.mp4").endswith("| 3. of 3 | advantage -0.50 | brightness 0.2")

    pairs = tmp_path / "rollouts" / "pairs.jsonl"
    listed = [(row["prompt"], row["chosen"], row["rejected"]) for row in read_jsonl(pairs)[0]]
    assert len(listed) == 6
    assert listed[3] == ("a dog", "step-000003/prompt-01-rank-01.mp4", "step-000003/prompt-01-rank-03.mp4")
    (tmp_path / "rollouts" / "step-000005").rename(tmp_path / "rollouts" / "replaced-step-000005")
    resumed = keeper(tmp_path, OneOf(), keep_rollouts=2, keep_rollouts_every=5)
    for rollout in (2, 3):  # not due
        resumed.keep([RolloutSample(rollout, 0, Prompt("a cat", ""), 0)], {}, SCORES, FOUND)
    assert [row["rollout"] for row in read_jsonl(pairs)[0]] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("available", "count", "ranks"),
    [(8, 4, [0, 1, 6, 7]), (8, 3, [0, 1, 7]), (8, 0, []), (3, 4, [0, 1, 2]), (1, 2, [0]), (0, 2, [])],
)
def test_half_of_the_clips_are_the_best_and_half_the_worst(available: int, count: int, ranks: list[int]) -> None:
    assert _select_ranks(available, count) == ranks


@pytest.mark.parametrize(
    ("options", "rollouts"),
    [
        ({}, [0, 10, 12]),  # every tenth, and the last of 13
        ({"report_to": "wandb", "keep_rollouts": 2}, [0, 10, 12]),
        ({"keep_rollouts_every": 7}, [0, 7, 12]),
        ({"keep_rollouts_every": 0}, []),
    ],
)
def test_clips_of_some_rollouts_are_kept_by_default(
    options: dict[str, Any], rollouts: list[int], tmp_path: Path
) -> None:
    found = keeper(tmp_path, OneOf(), train_steps=25, **options)  # two steps for each rollout
    assert [k for k in range(13) if found.wants(RolloutSample(k, 0, Prompt("a", ""), 0))] == rollouts


def test_a_long_run_keeps_few_rollouts_of_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 33 in all; clips that are noise are encoded with a limited rate, but not those that were requested."""
    for steps in (2, 640, 642, 20_000, 19_999):
        made = keeper(tmp_path, OneOf(), train_steps=steps)
        kept = [k for k in range(-(-steps // 2)) if made.wants(RolloutSample(k, 0, Prompt("a", ""), 0))]
        assert len(kept) <= 33
        assert (kept[0], kept[-1]) == (0, (steps - 1) // 2)
    monkeypatch.setattr("finetrainers.methods.grpo.keep.keep_rollouts.MAX_BYTES", 100_000)
    noise = {k: torch.randint(256, (17, 96, 128, 3), dtype=torch.uint8) for k in range(3)}
    jobs = [RolloutSample(0, prompt, Prompt("a", ""), k) for prompt in (0, 1) for k in range(3)]
    sizes = {}
    for count in (0, 2):
        keeper(tmp_path / str(count), OneOf(), keep_rollouts=count).keep(jobs, noise, SCORES, FOUND)
        clips = list((tmp_path / str(count)).rglob("*.mp4"))
        sizes[count] = sum(clip.stat().st_size for clip in clips)
        assert len(clips) == 2
        assert all(read_mp4(clip, columns=1)[0].shape == (1, 96, 128, 3) for clip in clips)
    assert sizes[0] <= 100_000 < 4 * sizes[0]
    assert sizes[2] > 4 * sizes[0]
