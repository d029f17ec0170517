"""Two GPUs over NCCL: the same training as one with twice the batch, and ranks that wait for each other."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_devices import Run, fp32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROOT = Path(__file__).parents[2]
FULL = {"training_type": "full-finetune"}
#: By launch, since the process group of one serves all its jobs: options of each.
LAUNCHES: dict[str, dict[str, dict[str, Any]]] = {
    "whole and split": {
        "ddp lora": {},
        "ddp lora, exchanged after backward": {"overlap_gradient_exchange": False},
        "ddp full": FULL,
        "shared lora": {"sp_size": 2, "batch_size": 2},
        "ring lora": {"sp_size": 2, "sp_mode": "ring", "batch_size": 2},
        "shared lora, compiled": {"sp_size": 2, "batch_size": 2, "compile": "regional"},
        "shared full, fsdp": {**FULL, "sp_size": 2, "batch_size": 2, "fsdp": "full"},
        "fsdp lora": {"fsdp": "full"},
        "fsdp full": {**FULL, "fsdp": "full"},
    },
    # Rank 1 waits for longer than a collective may take, while rank 0 saves; the one prompt is sampled on rank 0.
    "idle": {
        "slow save": {"nccl_timeout": 10, "_slow_saving": 20, "checkpointing_steps": 2},
        "sample": {
            "nccl_timeout": 10, "validation_prompts": "a red ball@@@9x64x64", "validation_steps": 2,
            "validation_inference_steps": 2,
        },
    },
    "on the host": {"offload": {**FULL, "fsdp": "full", "fsdp_cpu_offload": True}},
}  # fmt: skip


@pytest.mark.parametrize("launched", LAUNCHES)
def test_two_gpus_train_as_one(
    launched: str, tiny_repo: Callable[..., Path], clips: Path, plain: Callable[..., Run], tmp_path: Path
) -> None:
    jobs = jobs_of(LAUNCHES[launched], tiny_repo("ltx_video"), clips, tmp_path)
    for rank, found in enumerate(launch(jobs, tmp_path)):
        if "ddp lora" in jobs:
            assert found["ddp lora"]["digest"] == found["ddp lora, exchanged after backward"]["digest"]
        for name, result in found.items():
            training_type = jobs[name].get("training_type", "lora")
            expected = plain("cuda", training_type=training_type, exact=True)
            losses = [record["loss"] for record in result["metrics"] if "loss" in record]
            assert losses == pytest.approx(expected.curve(), rel=1e-2), f"{name}, rank {rank}"
            assert "cuda" in result["kind"]
            if "offload" not in name:
                norms = [record["grad_norm"] for record in result["metrics"] if "grad_norm" in record]
                assert norms == pytest.approx(expected.curve("grad_norm"), rel=5e-2), f"{name}, rank {rank}"


def test_a_rank_that_is_slow_or_out_of_memory(tiny_repo: Callable[..., Path], clips: Path, tmp_path: Path) -> None:
    """Waiting for the device does not include waiting for what the slow rank sends; both ranks retry."""
    changes = {
        "slow": {"_disturb": "slow", "logging_steps": 1, "train_steps": 6},
        "memory": {"_disturb": "memory", "batch_size": 2},
    }
    jobs = jobs_of(changes, tiny_repo("ltx_video"), clips, tmp_path)
    ranks = launch(jobs, tmp_path, script="stopping_rank.py")
    assert len({rank["memory"]["digest"] for rank in ranks}) == 1
    assert [[size for _, size in rank["memory"]["fits"]] for rank in ranks] == [[1], [1]]
    records = [json.loads(line) for line in (tmp_path / "slow" / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "loss" in record]
    assert statistics.mode(record["slowest_rank"] for record in records) == 1
    assert statistics.median(record["waiting_s"] for record in records) > 0.2


def jobs_of(changes: dict[str, dict[str, Any]], model: Path, clips: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """Options of runs."""
    jobs = {}
    for name, more in changes.items():
        lora = {} if more.get("training_type") else {"rank": 4, "lora_alpha": 8}
        jobs[name] = {
            "model_name": "ltx_video", "pretrained_model_name_or_path": str(model), "data_root": str(clips),
            "video_resolution_buckets": ["9x64x64"], "output_dir": str(directory / name), "train_steps": 3, "lr": 1e-2,
            "optimizer": "adamw", **fp32(), **lora, **more,
        }  # fmt: skip
    return jobs


def launch(jobs: dict[str, Any], directory: Path, *, script: str = "rank.py") -> list[dict[str, Any]]:
    """What each of two ranks wrote down, by job."""
    (directory / "jobs.json").write_text(json.dumps(jobs))
    path = ROOT / "tests" / "parallel" / script
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(path),
         str(directory / "jobs.json"), str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    files = [directory / f"rank{rank}.json" for rank in (0, 1)]
    assert all(file.is_file() for file in files), done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(file.read_text()) for file in files]
