"""Prompts and rewards from Python: a run with them equals one with files and registered names, and resumes alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from refusals import refused, refused_command, refused_options
from safetensors.torch import load_file
from torch import Tensor, nn

from finetrainers import load_config, train
from finetrainers.config.prompts import prompt_rows
from finetrainers.plan.digests import describe
from finetrainers.plan.initial_weights import LORA_FILE
from finetrainers.plan.parts import CustomParts
from finetrainers.rewards.base import Head, Reward
from finetrainers.rewards.pixels import Brightness
from finetrainers.rewards.registry import REWARDS, resolve_reward
from finetrainers.rewards.reward_set import RewardError
from finetrainers.rundir.find import scan_checkpoints

ROWS: list[Any] = [
    {"prompt": "a red ball", "level": 0.5},
    {"prompt": "a cat ", "level": 0.1},
    {"text": "a dog", "level": 0.9},
]


def level(videos: Tensor, prompts: Sequence[str], *, level: Sequence[float]) -> list[float | None]:
    """Return the closeness of the brightness to the level of the prompt, or None if it is the highest."""
    means = videos.mean(dim=(1, 2, 3, 4)).tolist()
    return [None if target == 0.9 else -abs(mean - target) for mean, target in zip(means, level, strict=True)]


async def red(videos: Tensor, prompts: Sequence[str]) -> np.ndarray:
    await asyncio.sleep(0)
    return videos[:, :, 0].mean(dim=(1, 2, 3)).numpy()


class Edges(Reward):
    """A reward with several scores and an option."""

    heads: ClassVar = {"rows": Head(), "columns": Head()}

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> dict[str, Tensor]:
        return {name: self.scale * videos.diff(dim=dim).abs().mean(dim=(1, 2, 3, 4))
                for name, dim in (("rows", 3), ("columns", 4))}  # fmt: skip


class Judge(nn.Module):
    """A network that scores clips."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        nn.init.constant_(self.linear.weight, weight)

    def forward(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.linear(videos.mean(dim=(1, 3, 4))).squeeze(1)


@pytest.fixture
def values(tiny_repo: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    values = {"method": "grpo", "pretrained_model_name_or_path": tiny_repo("ltx_video"), "rollout_size": "1x64x64"}
    values |= {"prompts_per_step": 2, "num_generations": 2, "batch_size": 4, "sampling_steps": 3, "train_steps": 2}
    values |= {f"{part}_dtype": "fp32" for part in ("transformer", "vae", "text_encoder")}
    values |= {"lr": 1e-2, "rank": 4, "lora_alpha": 8, "optimizer": "adamw", "checkpointing_steps": 1}
    return {**values, "output_dir": tmp_path / "run", "precompute_dir": tmp_path / "cache"}


def outcome(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return what a run has logged, without times, and its weights."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "reward/", "eval_reward/", "grad_norm")
    logged = [
        {name: value for name, value in record.items() if name == "step" or name.startswith(names)}
        for record in records
    ]
    return [record for record in logged if record.keys() - {"step"}], load_file(run_dir / LORA_FILE)


@pytest.mark.rotating
def test_a_run_equals_one_with_files_and_names(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(0.5)
    rewards: dict[str, Any] = {"level": level, "red": red, "edges": Edges, "judge": judge, "bright": Brightness()}
    named = {
        "reward": ["level", "red=2", "edges.rows=0.5,scale=3", "judge"],
        "eval_reward": ["bright"],
        "eval_steps": 1,
    }
    paths = tmp_path / "prompts.jsonl", tmp_path / "held_out.jsonl"
    for path, rows in zip(paths, (ROWS, ROWS[:1]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with monkeypatch.context() as patch:
        patch.setattr(REWARDS, "registered", REWARDS.registered | rewards | {"bright": Brightness})
        files = {"prompts": paths[0], "eval_prompts": paths[1], "output_dir": tmp_path / "files"}
        records, weights = outcome(train(load_config(**{**values, **named, **files})).run_dir)
    assert {name for record in records for name in record} >= {"reward/level", "reward/red", "eval_reward/bright"}
    cached = sorted((tmp_path / "cache").rglob("*"))

    parts: dict[str, Any] = {"prompts": ROWS, "eval_prompts": ROWS[:1], "rewards": rewards}
    result = train(load_config(**values, **named), **parts)
    actual_records, actual_weights = outcome(result.run_dir)
    assert actual_records == records
    assert all(torch.equal(actual_weights[name], tensor) for name, tensor in weights.items())
    assert sorted((tmp_path / "cache").rglob("*")) == cached
    with refused("unknown", "level"):  # nothing is left in this process
        resolve_reward("level")
    assert judge.training
    assert all(weight.grad is None for weight in judge.parameters())

    # The run goes on in Python with equal parts, bit for bit, and names those that are missing or differ.
    config = load_config(
        result.run_dir / "config.toml",
        output_dir=tmp_path / "b",
        resume_from_checkpoint=result.run_dir / "checkpoints/step-1",
    )
    names = [part.partition("=")[0] for part in config.run.parts]
    assert names == ["prompts", "eval_prompts", *(f"rewards.{name}" for name in rewards)]
    resumed = train(config, **{**parts, "prompts": [dict(row) for row in ROWS]})
    assert outcome(resumed.run_dir)[0] == records[-2:]
    assert all(torch.equal(outcome(resumed.run_dir)[1][name], tensor) for name, tensor in weights.items())
    with refused_options(("--parts", "required"), ("--parts", "required")) as refusal:
        train(config, eval_prompts=ROWS[:1], rewards={name: rewards[name] for name in rewards if name != "red"})
    assert "rewards={'red': ...}" in str(refusal.value)
    for other in ({"prompts": ROWS[:2]}, {"rewards": {**rewards, "judge": Judge(0.6)}}):
        with refused_options(("--resume_from_checkpoint", "mismatch")):
            train(config.model_copy(), **{**parts, **other})
    command = ["train", "--config", result.run_dir / "config.toml", "--resume_from_checkpoint", "latest"]
    code, problems = refused_command(command)
    assert code
    assert problems == [("--reward", "required")] * 4 + [("--eval_reward", "required"), ("--prompts", "required")]


def test_inputs_that_cannot_be_used_are_refused_before_loading(values: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(**values, dry_run=True)
    for expected, parts in (
        ([("--prompts", "required"), ("--reward", "required")], {}),
        ([("prompts", "invalid"), ("eval_prompts", "invalid"), ("rewards", "invalid")],
         {"prompts": "cats.txt", "eval_prompts": iter(["a cat"]), "rewards": [level]}),
        ([("prompts", "required")], {"prompts": [], "rewards": {"red": red}}),
        ([("prompts[2]", "invalid"), ("prompts[3]", "invalid")],
         {"prompts": ["a", {"prompt": "b", "level": np.int64(4)}, 3, {"prompt": "b", "level": {4}}]}),
        ([("rewards.brightness", "duplicate"), ("rewards.colour", "duplicate"), ("rewards.a.b", "invalid"),
          ("rewards.text", "invalid"), ("rewards.number", "invalid"), ("rewards.module", "invalid")],
         {"rewards": {"brightness": level, "colour": level, "a.b": level, "text": "a:b", "number": 3,
                      "module": Judge}}),
        ([("--reward", "mismatch")], {"prompts": ["a"], "rewards": {"few": lambda videos: videos}}),
        ([("--reward", "required")], {"prompts": ["a"], "rewards": {"edges": Edges(2.0)}}),  # has two scores
        ([("--reward", "required")], {"prompts": ["a"], "rewards": {"level": level}}),  # needs a column
        ([("--reward", "conflict")], {"prompts": ROWS, "rewards": {"mean": lambda clips, level: clips}}),
        ([("data", "invalid")], {"prompts": [{"prompt": "a", "image": tmp_path}], "rewards": {"red": red}}),
    ):  # fmt: skip
        with refused_options(*expected):
            train(config, **parts)
    named = load_config(config, prompts="prompts.txt", reward=["brightness"])
    with refused_options(("--prompts", "conflict")):
        train(named, prompts=["a"])
    with refused_options(("rewards.red", "conflict")):  # no option names it
        train(load_config(config, reward=["brightness"]), prompts=["a"], rewards={"red": red})
    with refused_options(("--reward", "unknown")) as refusal:
        train(load_config(config, reward=["redd", "red"]), prompts=["a"], rewards={"red": red})
    assert "'red'?" in str(refusal.value)
    with refused_options(("--method", "unsupported"), ("--data_root", "required")):
        train(load_config(config, method="sft"), prompts=["a"])


def test_a_string_is_one_prompt() -> None:
    as_text, as_list = (CustomParts(prompts=prompts).by_name["prompts"] for prompts in ("a cat", ["a cat"]))
    assert prompt_rows(as_text) == prompt_rows(as_list) == [{"prompt": "a cat"}]


def test_other_methods_score_held_out_prompts(options: Callable[..., dict]) -> None:
    config = load_config(**options(dry_run=True, eval_reward=["bright"], eval_steps=1))
    held_out = ["a ball", {"prompt": "a cat", "size": "1x64x64"}]
    assert train(config, eval_prompts=held_out, rewards={"bright": Brightness()}).config.run.parts[1:] == [
        f"rewards.bright={describe(Brightness()).text}"
    ]
    with refused_options(("eval_prompts[1]", "unknown")):
        train(config, eval_prompts=["a ball", {"prompt": "a cat", "wide": 64}], rewards={"bright": Brightness()})


def test_plain_noised_methods_start_from_different_noise(values: dict[str, Any]) -> None:
    for method, same in (("grpo", True), ("nft", False), ("awm", False)):
        config = load_config(**{**values, "method": method})
        assert config.grpo.init_same_noise is same
    stated = load_config(**{**values, "method": "nft", "init_same_noise": True, "dry_run": True})
    with refused_options(("--init_same_noise", "unsupported")):
        train(stated, prompts=["a"], rewards={"red": red})
    dry = load_config(**{**values, "method": "awm", "dry_run": True})
    assert train(dry, prompts=["a"], rewards={"red": red}).config.grpo.reward[0].name == "red"


@pytest.mark.parametrize("method", ["grpo", "refl"])
def test_rewards_without_any_score_are_named_and_leave_no_nan(
    values: dict[str, Any], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    class Silent(Reward):
        differentiable = True

        def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> dict[str, list[None]]:
            return {"score": [None] * len(prompts)}

        differentiate = score

    values |= {"train_steps": 1, "method": method}
    if method == "refl":
        del values["num_generations"]
    result = train(load_config(**values), prompts=["a ball", "a cat"], rewards={"silent": Silent})
    warnings = [record.message for record in caplog.records if "silent" in record.message]
    assert len(warnings) == 1
    assert "rollout 0" in warnings[0]
    text = (result.run_dir / "metrics.jsonl").read_text()
    assert not {"NaN", "Infinity"} & set(text.replace(",", " ").split())
    [record] = [record for record in result.metrics if "loss" in record or "failed_clips" in record]
    assert record["failed_clips"] > 0


@pytest.mark.parametrize(
    ("options", "fails_at"),
    [
        ({"updates_per_rollout": 2, "batch_size": 2}, 3),
        ({"method": "nft", "noise_levels": 1, "old_policy_decay": [0, 0.5, 0.5]}, 3),
        ({"eval_steps": 2, "eval_reward": ["judge"]}, 4),
    ],
    ids=["grpo", "nft", "evaluation"],
)
def test_a_reward_that_fails_loses_no_update(
    options: dict[str, Any], fails_at: int, values: dict[str, Any], tmp_path: Path
) -> None:
    """The run saves before it ends; resumed when the reward works, it equals one that never stopped."""
    calls = tmp_path / "calls"

    def judge(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        with calls.open("a") as file:
            file.write(".")
        if calls.stat().st_size == fails_at:
            raise ConnectionError("judge-down")
        return videos.mean(dim=(1, 2, 3, 4))

    judge.patience = 0.0  # type: ignore[attr-defined]
    values |= {"reward": ["judge"], "train_steps": 4, "checkpointing_steps": 0, **options}
    parts: dict[str, Any] = {"prompts": ["a cat", "a ball", "a dog", "a hat"], "rewards": {"judge": judge}}
    parts |= {"eval_prompts": ["held out"]} if "eval_steps" in options else {}
    with pytest.raises(RewardError, match="judge-down"):
        train(load_config(**values), **parts)
    assert [found.step for found in scan_checkpoints(values["output_dir"])] == [2]
    resumed = train(load_config(**values, resume_from_checkpoint="latest"), **parts)
    straight = train(load_config(**{**values, "output_dir": tmp_path / "straight"}), **parts)
    (_, expected), (_, actual) = outcome(straight.run_dir), outcome(resumed.run_dir)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
