"""DeepSpeed on two real processes: ZeRO-2 and ZeRO-3 train, save, sample and resume as one process does."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetrainers.config.load import load_config
from finetrainers.engine.run import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

STAGES = [2, 3]
SCHEDULE = {"lr_scheduler": "cosine", "lr_warmup_steps": 2, "max_grad_norm": 0.02, "checkpointing_steps": 2}
LORA = {"train_steps": 3, "eval_num_items": 1, "eval_steps": 3, **SCHEDULE}
SAMPLES = {"validation_prompts": "one@@@9x64x64:::two@@@9x64x64:::three@@@9x64x64", "validation_inference_steps": 2}
FULL = {"train_steps": 2, "training_type": "full-finetune", "gradient_accumulation_steps": 2, **SCHEDULE}


@pytest.fixture(scope="module")
def jobs(
    options: Callable[..., dict], launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """The run directories' parent, and what both ranks saw, by job."""
    root = tmp_path_factory.mktemp("deepspeed")
    todo = {}
    for stage in STAGES:
        lora, full = root / f"lora {stage}", root / f"full {stage}"
        todo[lora.name] = {**options(lora, **LORA, **SAMPLES), "_zero_stage": stage}
        # Again from the second step, in the same directory.
        todo[f"resumed {stage}"] = {**todo[lora.name], "resume_from_checkpoint": "2"}
        todo[full.name] = {**options(full, **FULL), "_zero_stage": stage}
    todo["averaged 3"] = {
        **options(root / "averaged", use_ema=True, on_nonfinite="skip", async_checkpointing=True),
        "_zero_stage": 3,
    }
    launcher = ["accelerate.commands.launch", "--use_deepspeed", "--zero_stage", "2", "--num_processes", "2"]
    machine = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    # What other engines need on a CPU would turn this one off.
    return root, launch([*launcher, *machine], todo, root, ACCELERATE_USE_CPU="false")


@pytest.fixture(scope="module")
def single(options: Callable[..., dict], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same runs on one process, with twice the batch."""
    directories = {name: tmp_path_factory.mktemp(name) for name in ("lora", "full")}
    larger = {"lora": {**LORA, "batch_size": 2}, "full": {**FULL, "gradient_accumulation_steps": 4}}
    for name, changes in larger.items():
        train(load_config(**options(directories[name], **changes)))
    return directories


def curve(records: list[dict[str, Any]], *names: str) -> torch.Tensor:
    return torch.tensor([[record[name] for name in names] for record in records if names[0] in record])


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["lora", "full"])
def test_same_training_as_one_process(name: str, stage: int, jobs: Any, single: dict[str, Path]) -> None:
    root, (rank, other) = jobs
    found = rank[f"{name} {stage}"]
    assert f"2 processes (deepspeed zero-{stage})" in found["kind"]
    if name == "full":  # where there is nothing else that both ranks look at
        assert not set(found["inputs"]) & set(other["full 2"]["inputs"])
    expected = read(single[name])
    columns = ("loss", "grad_norm", "lr")
    torch.testing.assert_close(curve(found["metrics"], *columns), curve(expected, *columns), rtol=1e-4, atol=0)
    if name == "lora":
        torch.testing.assert_close(
            curve(found["metrics"], "eval_loss"), curve(expected, "eval_loss"), rtol=1e-5, atol=0
        )
    file = {"lora": "pytorch_lora_weights.safetensors", "full": "transformer/diffusion_pytorch_model.safetensors"}[name]
    ours, theirs = load_file(root / f"{name} {stage}" / file), load_file(single[name] / file)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("stage", STAGES)
def test_resuming_changes_nothing(stage: int, jobs: Any) -> None:
    _, (rank, _) = jobs
    straight, resumed = rank[f"lora {stage}"], rank[f"resumed {stage}"]
    assert len(resumed["inputs"]) < len(straight["inputs"])
    columns = ("loss", "grad_norm", "step")
    assert torch.equal(curve(straight["metrics"], *columns), curve(resumed["metrics"], *columns))
    assert straight["results"] == resumed["results"] != {}


@pytest.mark.parametrize("stage", STAGES)
def test_all_samples_are_written(stage: int, jobs: Any) -> None:
    root, _ = jobs
    found = sorted(path.name for path in (root / f"lora {stage}" / "samples" / "step-000003").glob("*.mp4"))
    assert found == ["00-one-0.mp4", "01-two-0.mp4", "02-three-0.mp4"]


def test_an_average_of_shards_is_refused(jobs: Any) -> None:
    for rank in jobs[1]:
        assert "--use_ema: averages need whole weights" in rank["averaged 3"]["error"]
        assert "--async_checkpointing: DeepSpeed writes its own files" in rank["averaged 3"]["error"]
        assert "--on_nonfinite skip: DeepSpeed updates the weights before" in rank["averaged 3"]["error"]
