"""DeepSpeed on two real processes: ZeRO-1, 2 and 3 train, save, sample and resume as one process does."""

from __future__ import annotations

import importlib.util
import json
import math
from argparse import Namespace
from collections.abc import Callable
from itertools import count
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from rank_jobs import Jobs
from safetensors.torch import load_file

from finetrainers.config.load import load_config
from finetrainers.methods.sft import SFT
from finetrainers.rundir.manifest import damage, read_manifest
from finetrainers.runs.training import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

STAGES = [1, 2, 3]
#: Other strategies' tests show each mechanism every day; stages have their turn by themselves.
SPLIT, ALL = (
    [pytest.param(stage, marks=pytest.mark.rotating(f"deepspeed zero-{stage}")) for stage in stages]
    for stages in ([2, 3], STAGES)
)
CONFIG = Path(__file__).parents[2] / "accelerate_configs" / "deepspeed_zero2.yaml"
SCHEDULE = {"lr_scheduler": "cosine", "lr_warmup_steps": 2, "max_grad_norm": 0.02, "checkpointing_steps": 2}
LORA = {"train_steps": 3, "eval_num_items": 1, "eval_steps": 3, **SCHEDULE}
SAMPLES = {"validation_prompts": "one@@@9x64x64:::two@@@9x64x64:::three@@@9x64x64", "validation_inference_steps": 2}
QUANTIZED = {"train_steps": 2, "quantize_frozen": "int8", "max_grad_norm": 0.02}
FULL = {"train_steps": 2, "training_type": "full-finetune", "gradient_accumulation_steps": 2, **SCHEDULE}


def jobs_below(root: Path, options: Callable[..., dict]) -> dict[str, dict[str, Any]]:
    todo = {}
    for stage in STAGES:
        lora, full = root / f"lora {stage}", root / f"full {stage}"
        todo[full.name] = {**options(full, **FULL), "_zero_stage": stage, "_least_file_bytes": 1000}
        if stage == 1:  # it differs from 2 in when gradients are exchanged, and in nothing that adapters change
            continue
        todo[lora.name] = {**options(lora, **LORA, **SAMPLES), "_zero_stage": stage}
        # Again from the second step, in the same directory, with what blocks store kept, or on the host.
        stored = "keep_attention" if stage == 2 else "offload"
        todo[f"resumed {stage}"] = {**todo[lora.name], "resume_from_checkpoint": "2", "activation_memory": stored}
        todo[f"poisoned {stage}"] = {
            **options(root / f"poisoned {stage}", **FULL, on_nonfinite="skip"), "_zero_stage": stage, "_poisoned": 1,
        }  # fmt: skip
    refused = {"use_ema": True, "on_nonfinite": "rollback", "async_checkpointing": True, "checkpointing_steps": 1}
    todo["averaged 3"] = {**options(root / "averaged", **refused, quantize_frozen="int8"), "_zero_stage": 3}
    todo["quantized 2"] = {**options(root / "quantized", **QUANTIZED), "_zero_stage": 2}
    return todo


def launcher(processes: int) -> list[str]:
    """The file says ZeRO-2 (and the jobs otherwise); a CPU has no bf16 matrix units to test."""
    count = ["--num_processes", str(processes)]
    return ["accelerate.commands.launch", "--config_file", str(CONFIG), *count, "--mixed_precision", "no"]


@pytest.fixture(scope="module")
def jobs(options: Callable[..., dict], do_jobs: Callable[..., Jobs], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    root, needs = tmp_path_factory.mktemp("deepspeed"), {f"resumed {stage}": [f"lora {stage}"] for stage in STAGES}
    todo = jobs_below(root, options)
    return do_jobs(root, todo, launcher=launcher(2), needs=needs, ACCELERATE_USE_CPU="false")


@pytest.fixture(scope="module")
def single(options: Callable[..., dict], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`single(job)`: directory of the same run on one process, with twice the batch."""
    root = tmp_path_factory.mktemp("single")
    larger = {
        "lora": {**LORA, "batch_size": 2},
        "full": {**FULL, "gradient_accumulation_steps": 4},
        "quantized": {**QUANTIZED, "batch_size": 2},
    }

    def run(name: str) -> Path:
        if not (root / name).exists():
            train(load_config(**options(root / name, **larger[name])))
        return root / name

    return run


def curve(records: list[dict[str, Any]], *names: str) -> torch.Tensor:
    return torch.tensor([[record[name] for name in names] for record in records if names[0] in record])


def weights(directory: Path) -> dict[str, torch.Tensor]:
    lora = directory / "pytorch_lora_weights.safetensors"
    files = [lora] if lora.is_file() else sorted((directory / "transformer").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "stage"), [("full", 1), ("lora", 2), ("full", 2), ("lora", 3), ("full", 3)])
def test_same_training_as_one_process(name: str, stage: int, jobs: Jobs, single: Callable[[str], Path]) -> None:
    found, other = jobs[f"{name} {stage}"]
    assert f"2 processes (deepspeed zero-{stage})" in found["kind"]
    if name == "full":  # where there is nothing else that both ranks look at
        assert not set(found["inputs"]) & set(other["inputs"])
    expected = read(single(name))
    columns = ("loss", "grad_norm", "lr")
    torch.testing.assert_close(curve(found["metrics"], *columns), curve(expected, *columns), rtol=1e-4, atol=0)
    if name == "lora":
        torch.testing.assert_close(
            curve(found["metrics"], "eval_loss"), curve(expected, "eval_loss"), rtol=1e-5, atol=0
        )
    same_weights(jobs.directory(f"{name} {stage}"), single(name))


@pytest.mark.rotating
@pytest.mark.parametrize("stage", SPLIT)
def test_resuming_changes_nothing(stage: int, jobs: Jobs) -> None:
    straight, resumed = jobs[f"lora {stage}"][0], jobs[f"resumed {stage}"][0]
    assert len(resumed["inputs"]) < len(straight["inputs"])
    columns = ("loss", "grad_norm", "step")
    assert torch.equal(curve(straight["metrics"], *columns), curve(resumed["metrics"], *columns))
    assert straight["results"] == resumed["results"] != {}


@pytest.mark.parametrize("stage", SPLIT)
def test_all_samples_are_written(stage: int, jobs: Jobs) -> None:
    found = sorted(path.name for path in (jobs.directory(f"lora {stage}") / "samples" / "step-000003").glob("*.mp4"))
    assert found == ["00-one-0.mp4", "01-two-0.mp4", "02-three-0.mp4"]


def test_an_average_of_shards_is_refused(jobs: Jobs) -> None:
    for rank in jobs["averaged 3"]:
        expected = {"--use_ema", "--async_checkpointing", "--on_nonfinite rollback", "--quantize_frozen"}
        assert expected <= {*rank["places"]}
        assert "quantize_frozen: ZeRO-3 " in rank["error"]


@pytest.mark.rotating
def test_quantized_weights_under_stage_2(jobs: Jobs, single: Callable[[str], Path]) -> None:
    columns = ("loss", "grad_norm")
    found = jobs["quantized 2"][0]["metrics"]
    torch.testing.assert_close(curve(found, *columns), curve(read(single("quantized")), *columns), rtol=1e-5, atol=0)


@pytest.mark.rotating
@pytest.mark.parametrize("stage", SPLIT)
def test_a_step_that_is_not_finite_changes_nothing(
    stage: int, jobs: Jobs, options: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anything of its gradients stay for the next step: one process agrees."""
    loss, calls = SFT.loss, count()

    def poisoned(method: SFT, transformer: Any, batch: Any) -> Any:
        value, metrics = loss(method, transformer, batch)
        factor = math.nan if next(calls) == 0 else 1.0
        return value * factor, {name: one * factor for name, one in metrics.items()}

    monkeypatch.setattr(SFT, "loss", poisoned)
    train(load_config(**options(tmp_path, **{**FULL, "gradient_accumulation_steps": 4}, on_nonfinite="skip")))
    found = jobs[f"poisoned {stage}"][0]["metrics"]
    expected = read(tmp_path)
    assert [record.get("nonfinite_steps") for record in found if record["step"] == 1] == [1]
    assert len(curve(found, "loss")) == 1
    columns = ("loss", "grad_norm", "lr")
    torch.testing.assert_close(curve(found, *columns), curve(expected, *columns), rtol=1e-4, atol=0)
    same_weights(jobs.directory(f"poisoned {stage}"), tmp_path)


@pytest.mark.parametrize("stage", ALL)
def test_each_process_writes_its_part(stage: int, jobs: Jobs) -> None:
    """Weights in several files, and DeepSpeed's own, which the processes have hashed between them; nothing is
    damaged."""
    checkpoint = jobs.directory(f"full {stage}") / "checkpoints" / "step-2"
    files = read_manifest(checkpoint)["files"]
    assert sum(name.startswith("transformer/diffusion_pytorch_model-") for name in files) > 2
    assert sum(name.startswith("deepspeed/state/") and "optim_states" in name for name in files) == 2
    assert damage(checkpoint, contents=True) is None


@pytest.mark.parametrize("stage", ALL)
def test_checkpoints_convert_to_the_universal_format(stage: int, jobs: Jobs, tmp_path: Path) -> None:
    """DeepSpeed's own converter makes whole weights and moments of them, which load on any number of processes."""
    from deepspeed.checkpoint.ds_to_universal import main

    checkpoint = jobs.directory(f"full {stage}") / "checkpoints" / "step-2"
    main(
        Namespace(
            input_folder=str(checkpoint / "deepspeed" / "state"), output_folder=str(tmp_path / "universal"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip
    expected = weights(checkpoint)
    found = {path.name: path for path in (tmp_path / "universal" / "zero").iterdir() if path.is_dir()}
    assert found.keys() == expected.keys()
    for name, path in found.items():
        converted = torch.load(path / "fp32.pt", weights_only=False)
        converted = converted["param"] if isinstance(converted, dict) else converted
        assert torch.equal(converted.view(expected[name].shape), expected[name]), name
        assert {file.name for file in path.iterdir()} >= {"exp_avg.pt", "exp_avg_sq.pt"}


@pytest.mark.rotating
def test_another_number_of_processes_continues(
    jobs: Jobs,
    single: Callable[[str], Path],
    options: Callable[..., dict],
    do_jobs: Callable[..., Jobs],
    tmp_path: Path,
) -> None:
    """One process takes two's run on, weights and moments, as it takes on its own."""
    longer = {**FULL, "gradient_accumulation_steps": 4, "train_steps": 3, "resume_from_checkpoint": "2"}
    names = [f"full {stage}" for stage in STAGES]
    for name in names:
        copytree(jobs.directory(name), tmp_path / name)
    todo = {
        name: {**options(tmp_path / name, **longer), "_zero_stage": stage}
        for name, stage in zip(names, STAGES, strict=True)
    }
    continued = do_jobs(tmp_path, todo, launcher=launcher(1), processes=1, ACCELERATE_USE_CPU="false")
    copytree(single("full"), tmp_path / "single")
    train(load_config(**options(tmp_path / "single", **longer)))
    expected = read(tmp_path / "single")
    assert len(curve(expected, "loss")) == 3
    columns = ("loss", "grad_norm", "lr")
    for name in todo:
        [found] = continued[name]
        assert "1 process" in found["kind"]
        torch.testing.assert_close(curve(found["metrics"], *columns), curve(expected, *columns), rtol=1e-4, atol=0)
        same_weights(tmp_path / name, tmp_path / "single")
        assert not list((tmp_path / name / "checkpoints").glob(".*.tmp"))
