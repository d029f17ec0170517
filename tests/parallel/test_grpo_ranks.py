"""Reward finetuning on two real processes: the same rollouts, advantages and updates as on one."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
#: A group of four clips is spread over both ranks where there is one prompt.
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
    "kept": {"prompts_per_step": 2, "best_of_n": 2, "batch_size": 2, "lr": 1e-3, "train_steps": 1},
    "shared": {"prompts_per_step": 1, "best_of_n": 2, "batch_size": 1, "lr": 1e-3},
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
}
#: Without replay, against replay on one process. Of `drawn`, the ranks train other steps at the same time. Of `shared`,
#: the two clips that are trained may be on one rank, and both go backward.
REWEIGHT, RETAIN = {"rollout_gradients": "reweight"}, {"rollout_gradients": "retain"}
REWEIGHTED: dict[str, dict[str, Any]] = {
    "one group": {**REWEIGHT, "oom_retry": "off"},
    "kept": RETAIN,
    "kept, fsdp2": {**REWEIGHT, "fsdp": "full"},
    "shared, fsdp2": {**RETAIN, "fsdp": "full", "gradient_checkpointing": True},
    "drawn, fsdp2": {**REWEIGHT, "fsdp": "full"},
    "drawn, zero-2": {**REWEIGHT, "deepspeed": True},
}
REFUSED = "nft, fsdp2"
FILES = {"full": "transformer/diffusion_pytorch_model.safetensors"}


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
        for name, strategy in (STRATEGIES | {f"{name}, reweighted": of for name, of in REWEIGHTED.items()}).items()
    }
    for job in jobs.values():
        if job.get("training_type") == "full-finetune":
            del job["rank"], job["lora_alpha"]
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
            options = todo.get(name) or {
                **todo[f"{name}, fsdp2, reweighted"],
                "rollout_gradients": "replay",
                "fsdp": None,
            }
            train(load_config(**{**options, "output_dir": str(done[name])}))
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


@pytest.mark.rotating
@pytest.mark.parametrize("name", [name for name in REWEIGHTED if "zero" not in name])
def test_gradients_taken_while_sampling_are_those_of_replay(
    name: str, ranks: Jobs, alone: Callable[[str], Path]
) -> None:
    job, full = name.partition(", ")[0], f"{name}, reweighted"
    assert ranks[full][0]["digest"] == ranks[full][1]["digest"]
    for found, expected in zip(ranks[full][0]["metrics"], read(alone(job)), strict=True):
        for key in ("loss", "clips_trained", "grad_norm", "gradient/0.75-1.00"):
            assert found[key] == pytest.approx(expected[key], rel=2e-3, abs=1e-6), (key, found["step"])
    file = FILES.get("full" if job == "drawn" else job, "pytorch_lora_weights.safetensors")
    ours, theirs = load_file(ranks.directory(full) / file), load_file(alone(job) / file)
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-3)


@pytest.mark.rotating
def test_deepspeed_has_no_gradients_of_one_process(ranks: Jobs) -> None:
    for rank in ranks["drawn, zero-2, reweighted"]:
        assert rank["places"] == ["--rollout_gradients"]
        assert "DeepSpeed" in rank["error"]
