"""Reward finetuning on two real processes: the same rollouts, advantages and updates as on one, by plain replay."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_replay import score_latents, share_nothing
from rank_jobs import Jobs
from safetensors.torch import load_file

from finetrainers.config.load import load_config
from finetrainers.config.methods import METHODS, trait
from finetrainers.runs.training import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

AWM = {"prompts_per_step": 2, "method": "awm", "init_same_noise": False, "noise_levels": 2}
#: A group of four clips is spread over both ranks where there is one prompt. Of `drawn`, the ranks' prompts have other
#: windows.
JOBS: dict[str, dict[str, Any]] = {
    "groups": {"prompts_per_step": 2},
    "one group": {"prompts_per_step": 1, "batch_size": 2},
    "best of": {"prompts_per_step": 2, "best_of_n": 2, "batch_size": 2, "kl_coef": 0.1},
    # The clips of the first rollout differ by less than the floor, and one of its prompts is skipped in the second.
    "nft": {
        "prompts_per_step": 2,
        "method": "nft",
        "init_same_noise": False,
        "noise_levels": 2,
        "seed": 0,
        "selective_rollouts": 1e-9,
        "advantage_std_floor": 1e-3,
    },
    # Without copies of the weights, which no strategy that shards them can have, and with two of them.
    "awm": {**AWM, "kl_coef": 0.1, "old_policy_kl": 0.0},
    "awm twice": {**AWM, "updates_per_rollout": 2, "batch_size": 2},
    "refl": {"prompts_per_step": 2, "method": "refl", "draft_k": 2, "batch_size": 2, "kl_coef": 0.1, "train_steps": 1},
    "full": {"prompts_per_step": 2, "training_type": "full-finetune", "kl_coef": 0.1, "lr": 1e-3},
    "drawn": {
        "prompts_per_step": 2,
        "training_type": "full-finetune",
        "lr": 1e-3,
        "window_size": 1,
        "window_range": [0.0, 0.8],
        "window_per_prompt": True,
        "train_steps": 1,
    },
}
#: Of `best of`, ranks keep different numbers of clips, and the network is called for the reference between a forward
#: pass and its backward.
STRATEGIES: dict[str, dict[str, Any]] = {
    "groups": {},
    "one group": {},
    "best of": {},
    "nft": {},
    "awm": {},
    "awm twice": {},
    "refl": {},
    "full": {},
    "best of, fsdp2": {"fsdp": "full"},
    "best of, zero-2": {"deepspeed": True},
    "nft, zero-2": {"deepspeed": True},
    "refl, fsdp2": {"fsdp": "full"},
    "refl, zero-2": {"deepspeed": True},
    "nft, fsdp2": {"fsdp": "full"},
    "awm, fsdp2": {"fsdp": "full"},
    "full, fsdp2": {"fsdp": "full", "sync_each_batch": True},
    "drawn": {},
    "drawn, fsdp2": {"fsdp": "full"},
}
REFUSED = "nft, fsdp2"
FILES = dict.fromkeys(("full", "drawn"), "transformer/diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def todo(tiny_repo: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Options of all jobs."""
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
        "sampling_steps": 4,
        "transformer_dtype": "fp32",
        "vae_dtype": "fp32",
        "text_encoder_dtype": "fp32",
        "optimizer": "adamw",
        "lr": 1e-2,
        "epsilon": 1e-3,
        "rank": 4,
        "lora_alpha": 8,
        "train_steps": 2,
    }
    jobs = {
        name: {**common, **JOBS[name.partition(",")[0]], **strategy, "output_dir": str(root / name)}
        for name, strategy in STRATEGIES.items()
    }
    for job in jobs.values():
        if job.get("training_type") == "full-finetune":
            del job["rank"], job["lora_alpha"]
        if job["method"] == "grpo":
            job["_scores_latents"] = True
    return jobs


@pytest.fixture(scope="module")
def ranks(todo: dict[str, Any], do_jobs: Callable[..., Jobs], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # DeepSpeed's own launcher; other tests start processes in the other ways.
    launcher = ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
    return do_jobs(tmp_path_factory.mktemp("ranks"), todo, launcher=launcher, TORCHDYNAMO_DISABLE="1")


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(todo: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`alone(job)`: directory of the same run on one process."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("alone") / name
            options = todo[name]
            with pytest.MonkeyPatch.context() as patch:
                share_nothing(patch)
                if options.get("_scores_latents"):
                    score_latents(patch)
                values = {key: value for key, value in options.items() if not key.startswith("_")}
                train(load_config(**{**values, "output_dir": str(done[name])}))
        return done[name]

    return run


@pytest.mark.rotating
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != REFUSED])
def test_two_ranks_are_one(name: str, ranks: Jobs, alone: Callable[[str], Path]) -> None:
    job, _, strategy = name.partition(", ")
    assert f"2 processes ({strategy or 'DDP'}" in ranks[name][0]["kind"].replace("deepspeed ", "")
    assert ranks[name][0]["digest"] == ranks[name][1]["digest"]
    for found, expected in zip(ranks[name][0]["metrics"], read(alone(job)), strict=True):
        own = (
            ("loss", "reward_gradient") if job == "refl" else ("group_std/brightness", "advantage_abs", "clips_trained")
        )
        for key in ("reward/brightness", "grad_norm", *own):
            assert found[key] == pytest.approx(expected[key], rel=2e-3), (key, found["step"])
        if found["step"] == 1:
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6)
        if job == "nft":
            assert found["prompts_skipped"] == expected["prompts_skipped"] == found["step"] - 1
        elif job not in ("refl", "awm", "awm twice"):
            assert found["ratio_error"] == 0.0
    if job == "full":  # the model before training, a copy of which the strategy splits as well
        divergences = [record["kl"] for record in ranks[name][0]["metrics"]]
        assert divergences[0] == 0.0
        assert divergences[1] == pytest.approx(read(alone(job))[1]["kl"], rel=2e-3)
    file = FILES.get(job, "pytorch_lora_weights.safetensors")
    ours, theirs = load_file(ranks.directory(name) / file), load_file(alone(job) / file)
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-3)


def test_every_method_that_samples_clips_is_here() -> None:
    assert {job.get("method", "grpo") for job in JOBS.values()} == {
        method for method in METHODS.registered if trait(method, "samples")
    }


def test_a_policy_that_is_swapped_in_whole_is_refused_in_shards(ranks: Jobs) -> None:
    for rank in ranks[REFUSED]:
        assert rank["places"] == ["--method nft"]
