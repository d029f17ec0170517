"""Rewards that score samples while training on clips or pairs: nothing else changes; records, clips, card, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from one_of import OneOf

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.plan.memory_plan import run_memory
from finetrainers.plan.preflight import preflight
from finetrainers.training.callbacks.scores import SampleScores
from finetrainers.utils.phases import REWARD, TRAINING_STEP, VALIDATION

SCORED = {"eval_reward": ["brightness=2", "contrast=0.5"], "eval_steps": 2, "validation_inference_steps": 2}


def scores(done: Any) -> list[tuple[float, ...]]:
    names = ("step", "eval_reward/brightness", "eval_reward/contrast", "eval_reward/weighted_sum")
    return [tuple(r[name] for name in names) for r in done.metrics if "eval_reward/brightness" in r]


def test_training_is_the_same_and_so_are_scores_after_a_resume(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "eval.txt").write_text("a red ball@@@1x64x64\na dog\n")
    values = options(clips=2, train_steps=4, lora_dropout=0.3, checkpointing_steps=2, eval_num_items=1)
    values |= {"validation_prompts": "a cat", "validation_inference_steps": 2}
    plain = run(**{**values, "output_dir": str(tmp_path / "plain")})
    given = {**SCORED, "eval_prompts": str(tmp_path / "eval.txt")}
    scored = run(**{**values, **given, "output_dir": str(tmp_path / "scored")})
    resumed = run(
        **{**values, **given, "output_dir": str(tmp_path / "resumed")},
        resume_from_checkpoint=str(scored.root / "checkpoints" / "step-2"),
    )
    assert scored.curve("loss", "grad_norm") == plain.curve("loss", "grad_norm")
    assert all(torch.equal(weight, plain.weights[name]) for name, weight in scored.weights.items())
    found = scores(scored)
    assert [step for step, *_ in found] == [0, 2, 4]
    assert len({tuple(values) for _, *values in found}) == 3
    assert scores(resumed) == found[2:]

    samples = scored.root / "samples"
    assert {path.name for path in samples.glob("step-000004/*.mp4")} == {
        "00-a-cat-0.mp4", "eval-00-a-red-ball-0.mp4", "eval-01-a-dog-0.mp4",
    }  # fmt: skip
    assert {path.name for path in samples.glob("step-000002/*.mp4")} == {
        "eval-00-a-red-ball-0.mp4",
        "eval-01-a-dog-0.mp4",
    }
    assert (samples / "eval-01-a-dog-0.png").is_file()
    card = (scored.root / "README.md").read_text()
    for name in ("eval_loss", "eval_reward/brightness", "eval_reward/weighted_sum"):
        assert f"| `{name}` |" in card


def test_pairs_and_validation_prompts_are_scored(
    options: Callable[..., dict], run: Callable[..., Any], make_clips: Callable[..., Path], tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "p", "chosen": "0.mp4", "rejected": "1.mp4"}\n')
    done = run(
        **options(
            clips=2, method="dpo", dataset_file=str(pairs), train_steps=1, validation_prompts="a cat@@@1x64x64",
            num_validation_videos=2, **SCORED,
        )
    )  # fmt: skip
    assert [step for step, *_ in scores(done)] == [0, 1]
    assert len(list((done.root / "samples").glob("step-000001/00-a-cat-*.mp4"))) == 2


def test_scores_are_the_same_on_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has every second clip; one whose score is no number is left out, and not the others."""
    entries = [RewardEntry(**parse_reward("brightness=2")), RewardEntry(**parse_reward("contrast=0.5"))]
    draw = np.random.default_rng(0)
    clips = [(i, "p", draw.integers(0, 255, (3, 8, 8, 3), dtype=np.uint8)) for i in range(40)]
    one: Any = OneOf()
    whole = SampleScores(entries, one).record(clips, fps=8)
    shares: list[Any] = []

    class Rank(OneOf):
        def gather_objects(self, items: list[Any]) -> list[Any]:
            shares.extend(items)
            return list(shares)

    ranks: list[Any] = [Rank(), Rank()]
    found = [SampleScores(entries, rank).record(clips[r::2], fps=8) for r, rank in enumerate(ranks)]
    assert found[1] == whole
    values = [clip / 255 for _, _, clip in clips]
    assert whole["eval_reward/brightness"] == pytest.approx(np.mean([_brightness(v) for v in values]), rel=1e-5)

    # Sums of these depend on the order.
    shares.clear()
    alone, *ranked = (SampleScores(entries, rank) for rank in (one, *ranks))
    for scores_of in (alone, *ranked):
        monkeypatch.setattr(scores_of, "panel", SimpleNamespace(weights={"a": 1.0}, score=_exact))
    ranked[0].record(clips[0::2], fps=8)
    assert ranked[1].record(clips[1::2], fps=8) == alone.record(clips, fps=8)

    panel = SampleScores(entries, one)
    monkeypatch.setattr(panel, "panel", SimpleNamespace(weights={"a": 1.0, "b": 0.0}, score=_broken))
    assert panel.record(clips[:2], fps=8) == {"eval_reward/a": 1.0}


def _brightness(video: Any) -> float:
    return float((video @ np.array([0.299, 0.587, 0.114])).mean())


def _exact(video: Any, prompts: Any, *, fps: float, first_clip: int) -> Any:
    value = torch.tensor([1 / (first_clip + 3)], dtype=torch.float64)
    return SimpleNamespace(heads={"a": SimpleNamespace(raw=value, normalized=value)})


def _broken(video: Any, prompts: Any, *, fps: float, first_clip: int) -> Any:
    def head(value: float) -> Any:
        return SimpleNamespace(raw=torch.tensor([value]), normalized=torch.tensor([value]))

    return SimpleNamespace(heads={"a": head(1.0 if first_clip else float("nan")), "b": head(float("nan"))})


def test_what_cannot_be_scored_is_refused_before_loading(options: Callable[..., dict], tmp_path: Path) -> None:
    prompts = tmp_path / "eval.txt"
    prompts.write_text("a red ball@@@10x64x64\n")
    (tmp_path / "rows.jsonl").write_text('{"size": "9x64x64"}\n')
    for given, pattern in (
        ({"eval_reward": ["brightness"]}, "--eval_reward: .*--eval_prompts FILE "),
        ({"eval_reward": ["brightnes"], "validation_prompts": "a"}, "--eval_reward: .*'brightness'"),
        ({"eval_reward": ["brightness", "brightness"], "validation_prompts": "a"}, "--eval_reward: brightness .*twice"),
        ({"eval_reward": ["brightness"], "eval_prompts": str(prompts)}, "--eval_prompts: prompt 1, 10x64x64"),
        ({"eval_reward": ["brightness"], "eval_prompts": str(tmp_path / "gone.txt")}, "--eval_prompts: .*gone.txt"),
        ({"eval_reward": ["brightness"], "eval_prompts": str(tmp_path / "a.csv")}, ".txt, .jsonl, .toml"),
        ({"eval_reward": ["brightness"], "eval_prompts": str(tmp_path / "rows.jsonl")}, r" - \S*/rows\.jsonl "),
    ):
        with pytest.raises(ConfigError, match=pattern):
            preflight(load_config(**options(**given)))
    warnings = preflight(load_config(**options(eval_prompts=str(prompts)))).warnings
    assert any(re.search("--eval_prompts .*--eval_reward", warning) for warning in warnings)


def test_rewards_are_in_the_estimate(options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their networks stay on the device; scoring is a phase of its own."""
    given = {"validation_prompts": "a@@@9x64x64", "validation_inference_steps": 2}
    plain = run_memory(preflight(load_config(**options(**given)))).plan()
    monkeypatch.setattr("finetrainers.rewards.registry.reward_bytes", lambda entry: 2.0**30)
    monkeypatch.setattr("finetrainers.rewards.registry.working_bytes", lambda entry, size, fps: 2.0**20 * size[0])
    scored = run_memory(preflight(load_config(**options(**given, eval_reward=["clipscore"], eval_steps=1)))).plan()
    assert REWARD not in plain.phases
    networks, scoring = "networks of rewards", "activations of rewards"
    assert scored.phases[REWARD][networks] == 2**30
    assert scored.phases[REWARD][scoring] == 9 * 2**20
    for phase in (VALIDATION, TRAINING_STEP):
        assert scored.peaks[phase] - plain.peaks[phase] == pytest.approx(2**30, rel=1e-6)
