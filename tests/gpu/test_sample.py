"""Samples of a finished run: the frames of its validation, also with parts of the model in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_family import FAMILIES
from on_devices import Run, cases, fp32

from finetrainers.cli.main import main
from finetrainers.engine.callbacks import validation
from finetrainers.engine.sample import run


@pytest.mark.parametrize(("device", "family"), cases(*FAMILIES))
def test_samples_are_those_of_validation(
    device: str, family: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[np.ndarray] = []
    write = validation.write_sample
    monkeypatch.setattr(validation, "write_sample", lambda *a, **k: written.append(a[2]) or write(*a, **k))
    done = start(
        device, family, train_steps=1, validation_prompts="a red ball@@@9x64x64", validation_inference_steps=2,
        enable_model_cpu_offload=False, **(fp32(family) if device == "cpu" else {}),
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
