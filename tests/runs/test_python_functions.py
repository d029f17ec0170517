"""Public functions for the results of a run: estimate, sample, export, report, and results that are loaded again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused, refused_options
from safetensors.torch import load_file

from finetrainers import TrainResult, estimate, export, load_config, report, sample, train
from finetrainers.results import export as results


def test_functions_do_what_the_commands_do(
    options: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(**options(train_steps=1, id_token="ZORB"))
    planned = estimate(config, gpu="24GB")
    assert planned["fits"]
    assert planned["peak"]["allocated"] > 0
    with refused_options(("gpu", "unknown")):
        estimate(config, gpu="2400 apples")

    trained = train(config)
    result = TrainResult.load(trained.run_dir)
    assert (result.step, result.stopped_by, result.weights) == (1, None, trained.weights)

    torch.set_default_dtype(torch.float64)
    prompts = ["a ball ::: a cube", {"prompt": "a cube", "size": "1x64x64"}]
    samples = sample(trained, prompts=prompts, num_inference_steps=2, size="9x64x64")
    assert [record.message for record in caplog.records if "trigger word" in record.message]
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32)
    assert len(samples.clips) == samples.new == 2
    assert all(path.is_file() for path in samples.clips.values())
    with refused_options(("prompt", "unknown"), ("--num", "invalid")):
        sample(trained.run_dir, prompt="a ball", num=0)  # type: ignore[call-arg]
    with refused_options(("prompts", "required")):
        sample(trained.run_dir, prompts=[])
    assert sample(trained, prompts="another", num_inference_steps=2, size="9x64x64", dry_run=True).clips == {}

    [written] = export(trained.run_dir, ["peft"])
    assert json.loads((written.parent / "adapter_config.json").read_text())["r"] == 4
    with refused_options(("--format", "occupied")):
        export(trained.run_dir, ["peft"])
    wrong: dict[str, Any] = {"dtyp": "bf16", "dtype": "bf32", "lora_scale": math.nan, "one_file": True}
    with refused_options(
        ("formats", "unknown"), ("dtyp", "unknown"), ("--dtype", "unknown"), ("--lora_scale", "invalid"),
        ("--lora_scale", "unsupported"), ("--one_file", "unsupported"),
    ):  # fmt: skip
        export(trained.run_dir, ["onnx"], **wrong)
    with refused_options(("formats", "required")):
        export(trained.run_dir, [])
    assert export(trained, "peft", overwrite=True, dtype=torch.bfloat16) == [written]
    assert {tensor.dtype for tensor in load_file(written).values()} == {torch.bfloat16}

    assert report(trained) == trained.run_dir / "report.html"
    assert report(trained.run_dir, trained.run_dir.parent / "run", output=tmp_path / "both.html").is_file()
    with refused_options(("RUN", "not_found")):
        report(tmp_path / "nothing")

    uploads: list[Any] = []
    hub = SimpleNamespace(
        create_repo=lambda name, exist_ok: SimpleNamespace(repo_id=f"me/{name}"),
        upload_folder=lambda **arguments: uploads.append(arguments["folder_path"]),
    )
    monkeypatch.setattr(results, "HfApi", lambda token: hub)
    assert (result.push("mine"), uploads) == ("me/mine", [trained.run_dir])

    with (trained.run_dir / "events.jsonl").open("a") as file:
        file.write('{"event": "start", "step": 1}\n{"event": "stopped", "step": 2, "by": "SIGINT"}\n')
    stopped = TrainResult.load(trained.run_dir)
    assert (stopped.step, stopped.stopped_by) == (2, "SIGINT")
    with refused("not_found", trained.run_dir):
        stopped.push()
    with (trained.run_dir / "events.jsonl").open("a") as file:
        file.write('{"event": "start", "step": 2}\n')
    with refused("not_found", trained.run_dir):
        TrainResult.load(trained.run_dir)
    with refused_options(("run_dir", "not_found")):
        TrainResult.load(tmp_path / "nothing")
