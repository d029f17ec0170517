"""Reward finetuning on two real processes: the same rollouts, advantages and updates as on one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetrainers.config.load import load_config
from finetrainers.engine.run import train

pytestmark = pytest.mark.slow

#: A group of four clips is spread over both ranks where there is one prompt.
JOBS: dict[str, dict[str, Any]] = {
    "groups": {"prompts_per_step": 2},
    "one group": {"prompts_per_step": 1, "batch_size": 2},
    "best of": {"prompts_per_step": 2, "best_of_n": 2, "batch_size": 2, "kl_coef": 0.1},
    "nft": {"prompts_per_step": 2, "rl_algorithm": "nft", "init_same_noise": False, "nft_timesteps": 2},
}


@pytest.fixture(scope="module")
def jobs(tiny_repo: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("grpo")
    (root / "prompts.txt").write_text("a red ball\na blue cube rolls\na cat\n")
    common = {
        "method": "grpo",
        "model_name": "ltx_video",
        "pretrained_model_name_or_path": str(tiny_repo("ltx_video")),
        "prompts": str(root / "prompts.txt"),
        "reward": ["brightness"],
        "rollout_size": "9x64x64",
        "num_generations": 4,
        "batch_size": 4,
        "sampling_steps": 5,
        "transformer_dtype": "fp32",
        "vae_dtype": "fp32",
        "text_encoder_dtype": "fp32",
        "optimizer": "adamw",
        "lr": 1e-2,
        "epsilon": 1e-3,
        "rank": 4,
        "lora_alpha": 8,
        "train_steps": 3,
    }
    return root, {name: {**common, **changes, "output_dir": str(root / name)} for name, changes in JOBS.items()}


@pytest.fixture(scope="module")
def ranks(jobs: Any, launch: Callable[..., Any]) -> list[dict[str, Any]]:
    root, todo = jobs
    return launch(["torch.distributed.run", "--nproc_per_node", "2"], todo, root, TORCHDYNAMO_DISABLE="1")


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_are_one(name: str, jobs: Any, ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    root, todo = jobs
    assert "2 processes" in ranks[0][name]["kind"]
    assert ranks[0][name]["digest"] == ranks[1][name]["digest"]
    train(load_config(**{**todo[name], "output_dir": str(tmp_path / "alone")}))
    alone = read(tmp_path / "alone")
    for found, expected in zip(ranks[0][name]["metrics"], alone, strict=True):
        for key in ("reward/brightness", "group_std/brightness", "advantage_abs", "clips_trained", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=2e-3), (key, found["step"])
        if name != "nft":
            assert found["ratio_error"] == 0.0
    file = "pytorch_lora_weights.safetensors"
    ours, theirs = load_file(root / name / file), load_file(tmp_path / "alone" / file)
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-3)
