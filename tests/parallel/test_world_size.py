"""Runs that are continued on another number of processes: two, then one, then two again, as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import Jobs
from safetensors.torch import load_file

from finetrainers.config.load import load_config
from finetrainers.runs.training import train

pytestmark = pytest.mark.slow

#: Five clips, so that steps span epochs and batches differ in size; dropout, so that its masks must not go by rank.
SFT = {
    "batch_size": 2,
    "lora_dropout": 0.5,
    "use_ema": True,
    "caption_dropout_p": 0.5,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 3,
}
JOBS: dict[str, dict[str, Any]] = {
    "lora": SFT,
    "sharded": {"training_type": "full-finetune", "lr": 1e-3, "optimizer": "adamw", "fsdp": "full"},
    "rollouts": {
        "method": "grpo", "reward": ["brightness"], "rollout_size": "9x64x64", "num_generations": 4, "batch_size": 2,
        "prompts_per_step": 2, "updates_per_rollout": 2, "sampling_steps": 4, "optimizer": "adamw",
    },
}  # fmt: skip
#: After which step one process stops, and two end the run; rollouts of two updates each can be resumed between them
#: alone.
STOPS = {"lora": (3, 4), "sharded": (3, 4), "rollouts": (4, 6)}


def of_a_reward_run(values: dict[str, Any]) -> dict[str, Any]:
    """Without what only training on clips has a use for."""
    return {name: value for name, value in values.items() if name not in ("data_root", "video_resolution_buckets")}


@pytest.fixture(scope="module")
def roots(
    options: Callable[..., dict], do_jobs: Callable[..., Jobs], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """`roots(job)`: a run on two processes; one on two for two steps, on one to the first of `STOPS`, on two to the
    end."""
    root = tmp_path_factory.mktemp("world")
    (root / "prompts.txt").write_text("a red ball\na blue cube rolls\na cat\n")

    def job(name: str, kind: str, **changes: Any) -> dict[str, Any]:
        values = options(root / f"{kind}-{name}", **{**JOBS[name], "train_steps": STOPS[name][1], **changes})
        return values if name != "rollouts" else {**of_a_reward_run(values), "prompts": str(root / "prompts.txt")}

    again = {"resume_from_checkpoint": "latest"}
    todo = {f"straight {name}": job(name, "straight", checkpointing_steps=2) for name in JOBS}
    on_two = do_jobs(
        root, todo | {f"moved {name}": job(name, "moved", **again) for name in JOBS}, TORCHDYNAMO_DISABLE="1"
    )

    def run(name: str) -> tuple[Path, Path]:
        begun, moved = on_two.directory(f"straight {name}"), root / f"moved-{name}"
        (moved / "checkpoints").mkdir(parents=True)  # as a run that was stopped after two steps has left them
        (moved / "checkpoints" / "step-2").symlink_to(begun / "checkpoints" / "step-2")
        alone = {} if name == "rollouts" else {"gradient_accumulation_steps": 2}
        if name == "sharded":
            alone["fsdp"] = None
        train(load_config(**job(name, "moved", **again, **alone, train_steps=STOPS[name][0])))
        for kind in ("straight", "moved"):
            assert all("2 processes" in rank.get("kind", rank.get("error")) for rank in on_two[f"{kind} {name}"])
        return begun, moved

    return run


def records(directory: Path, *names: str) -> dict[int, list[float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: [record[name] for name in names] for record in lines if "loss" in record}


@pytest.mark.rotating
@pytest.mark.parametrize("name", JOBS)
def test_the_number_of_processes_may_change(name: str, roots: Callable[[str], tuple[Path, Path]]) -> None:
    straight, moved = roots(name)
    names = ("loss", "grad_norm", "lr", *(["reward/brightness"] if name == "rollouts" else []))
    expected, found = records(straight, *names), records(moved, *names)
    last = STOPS[name][1]
    assert list(found) == [*range(3, last + 1)]
    for step, values in found.items():
        # The first number after each move comes from the same weights; in a rollout, differences of rounding grow.
        tolerance = {"rtol": 2e-3, "atol": 1e-6} if name == "rollouts" else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(values, expected[step], msg=lambda m, s=step: f"step {s}: {m}", **tolerance)
    states = [
        json.loads((path / "checkpoints" / f"step-{last}" / "state.json").read_text()) for path in (straight, moved)
    ]
    assert states[0]["course"] == states[1]["course"]  # as many clips a step all the way: nothing to keep
    for file in (
        "pytorch_lora_weights.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
        "ema.safetensors",
    ):
        ours, theirs = (path / "checkpoints" / f"step-{last}" / file for path in (moved, straight))
        if not theirs.is_file():
            continue
        one, other = load_file(ours), load_file(theirs)
        for key, value in one.items():
            torch.testing.assert_close(value, other[key], rtol=1e-3, atol=1e-3 if name == "rollouts" else 1e-5)
