"""Training commands in real processes that faults are injected into, and the run that none was injected into."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_process import Python, RealProcess
from safetensors.torch import load_file

from finetrainers.rundir.find import scan_checkpoints
from finetrainers.utils.video import write_mp4

STEPS = 8


@dataclass(frozen=True)
class RunFiles:
    """What a run has left in its directory."""

    root: Path

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints that are there and whole."""
        return [found.step for found in scan_checkpoints(self.root) if found.damage is None]

    @property
    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in (self.root / "events.jsonl").read_text().splitlines()]

    @property
    def curve(self) -> list[tuple[float, float, float]]:
        """Step, loss and gradient norm."""
        records = map(json.loads, (self.root / "metrics.jsonl").read_text().splitlines())
        return [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]

    def same_as(self, other: RunFiles) -> bool:
        """Whether curve and results are the same, bit for bit."""
        ours, theirs = (load_file(run.root / "pytorch_lora_weights.safetensors") for run in (self, other))
        same = ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
        return same and self.curve == other.curve


@pytest.fixture(scope="session")
def flags(tmp_path_factory: pytest.TempPathFactory, tiny_repo: Callable[..., Path]) -> Callable[..., list[str]]:
    """`flags(output_dir, **changes)`: a training command of `STEPS` steps that saves after each, on two clips."""
    folder = tmp_path_factory.mktemp("clips")
    rng = np.random.default_rng(0)
    for k in range(2):
        ramp = np.linspace(0, 200, 64)[None, None, :, None] + rng.integers(0, 40, (9, 64, 1, 3))
        write_mp4(folder / f"{k}.mp4", np.broadcast_to(ramp, (9, 64, 64, 3)).astype(np.uint8), fps=8)
        (folder / f"{k}.txt").write_text(f"ramp number {k}")

    def build(output_dir: Path, **changes: Any) -> list[str]:
        values = {
            "model_name": "ltx_video", "pretrained_model_name_or_path": tiny_repo("ltx_video"), "data_root": folder,
            "output_dir": output_dir, "video_resolution_buckets": "9x64x64", "transformer_dtype": "fp32",
            "vae_dtype": "fp32", "text_encoder_dtype": "fp32", "rank": 4, "lora_alpha": 8, "lora_dropout": 0.3,
            "lr": 1e-2, "train_steps": STEPS, "checkpointing_steps": 1, "checkpointing_limit": 2, **changes,
        }  # fmt: skip
        return ["train", *(word for name, value in values.items() if value is not None
                for word in ((f"--{name}",) if value is True else (f"--{name}", str(value))))]  # fmt: skip

    return build


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, flags: Callable[..., list[str]]) -> RunFiles:
    """A run that nothing happens to."""
    directory = tmp_path_factory.mktemp("straight")
    python = Python(directory)
    done = python("-m", "finetrainers", *flags(directory / "run"))
    assert done.wait() == 0, done.stderr
    return RunFiles(directory / "run")


@pytest.fixture
def train(python: Python, flags: Callable[..., list[str]], tmp_path: Path) -> Callable[..., RealProcess]:
    """`train(fault="", **changes)`: the command with a fault, in `tmp_path / "run"`; `ranks=2` for a list of
    processes."""

    def start(
        fault: str = "", *, resume: bool = False, ranks: int = 1, output_dir: Path | None = None, **changes: Any
    ) -> Any:
        if resume:
            changes["resume_from_checkpoint"] = "latest"
        command: Sequence[str] = ("-m", "finetrainers", *flags(output_dir or tmp_path / "run", **changes))
        if ranks > 1:
            return python.ranks(ranks, *command, FINETRAINERS_FAULT=fault)
        return python(*command, FINETRAINERS_FAULT=fault)

    return start


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """What the commands of `train` leave."""
    return RunFiles(tmp_path / "run")
