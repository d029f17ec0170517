"""Samples of a finished run, and of a watch: the frames of its validation, also with parts of the model in host
memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_family import FAMILIES
from on_devices import Run, cases, devices, fp32

from finetrainers.cli.main import main
from finetrainers.sampling import run
from finetrainers.training.callbacks import validation
from finetrainers.utils.video import read_mp4


#: HunyuanVideo's pipeline computes in the dtype of the network's outputs.
@pytest.mark.parametrize(("device", "family"), cases(*sorted(FAMILIES, key=lambda name: name != "hunyuan_video")))
def test_samples_are_those_of_validation(
    device: str, family: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[np.ndarray] = []
    write = validation.write_sample
    monkeypatch.setattr(validation, "write_sample", lambda *a, **k: written.append(a[2]) or write(*a, **k))
    done = start(
        device, family, train_steps=1, validation_prompts="a red ball@@@9x64x64", validation_inference_steps=2,
        enable_model_cpu_offload=False, mixed_precision="bf16",
    )  # fmt: skip
    drawn: list[np.ndarray] = []
    monkeypatch.setattr(run, "write_mp4", lambda path, clip, **_: drawn.append(clip) or path.write_bytes(b"x"))
    monkeypatch.setattr(run, "show", lambda plan, found: found)
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(device == "cpu").lower())
    for flag in ("--no-enable_model_cpu_offload", "--enable_model_cpu_offload"):
        arguments: list[Any] = [
            done.root,
            flag,
            "--output_dir",
            tmp_path / flag,
            "--lora_scale",
            1,
            0.5,
            "--compare",
            "base",
        ]
        assert main(["sample", *map(str, arguments)]) == 0
    assert np.array_equal(drawn[0], written[0])
    assert len(drawn) == 6
    assert [np.array_equal(*pair) for pair in zip(drawn[:3], drawn[3:], strict=True)] == [True] * 3
    assert not np.array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("device", devices())
def test_a_watch_draws_the_samples_of_validation_and_scores_them_as_training_does(
    device: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames of the last checkpoint are those of the run's last validation, and so are the scores of its
    rewards."""
    done = start(
        device, train_steps=2, checkpointing_steps=1, validation_prompts="a red ball@@@9x64x64", eval_steps=1,
        validation_inference_steps=2, eval_reward=["brightness"], enable_model_cpu_offload=False,
        **(fp32() if device == "cpu" else {}),
    )  # fmt: skip
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(device == "cpu").lower())
    chosen = "cpu" if device == "cpu" else "cuda:0"
    options = ["--device", chosen, "--no-enable_model_cpu_offload", "--best_by", "eval_reward/brightness"]
    assert main(["watch", str(done.root), "--once", "--no_track", *options]) == 0
    records = [json.loads(line) for line in (done.root / "watch" / "run" / "scores.jsonl").read_text().splitlines()]
    measured = [json.loads(line) for line in (done.root / "metrics.jsonl").read_text().splitlines()]
    wanted = {one["step"]: one["eval_reward/brightness"] for one in measured if "eval_reward/brightness" in one}
    # A watch scores the videos as they are compressed.
    assert [one["scores"]["brightness"] for one in records] == pytest.approx([wanted[1], wanted[2]], abs=0.01)
    [validated] = (done.root / "samples" / "step-000002").glob("*.mp4")
    [watched] = (done.root / "watch" / "run").glob("*step-000002*.mp4")
    assert np.array_equal(read_mp4(validated, columns=9)[0], read_mp4(watched, columns=9)[0])
    assert (done.root / "checkpoints" / "best").is_dir()
