"""Clips, options and launchers of multi-process runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_jobs import Jobs

from finetrainers.utils.video import write_mp4

RANK_SCRIPT = Path(__file__).with_name("rank.py")


@pytest.fixture(scope="session")
def five_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five clips of one bucket, each with a caption of its own."""
    folder = tmp_path_factory.mktemp("clips")
    rng = np.random.default_rng(0)
    for k in range(5):
        ramp = np.linspace(0, 200, 64)[None, None, :, None] + rng.integers(0, 40, (9, 64, 1, 3))
        write_mp4(folder / f"{k}.mp4", np.broadcast_to(ramp, (9, 64, 64, 3)).astype(np.uint8), fps=8)
        (folder / f"{k}.txt").write_text(f"ramp number {k}" + " again" * k)
    return folder


@pytest.fixture(scope="session")
def five_pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of five preference pairs of the five clips."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"pair {k}", "chosen": f"{k}.mp4", "rejected": f"{(k + 1) % 5}.mp4"} for k in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def options(tiny_repo: Callable[..., Path], five_clips: Path, five_pairs: str) -> Callable[..., dict[str, Any]]:
    """`options(output_dir, family, **changes)`: options of a short fp32 run on five clips."""

    def build(output_dir: Path, family: str = "ltx_video", **changes: Any) -> dict[str, Any]:
        values = {
            "model_name": family,
            "pretrained_model_name_or_path": str(tiny_repo(family)),
            "data_root": str(five_clips),
            "output_dir": str(output_dir),
            "video_resolution_buckets": ["9x64x64"],
            "transformer_dtype": "fp32",
            "vae_dtype": "fp32",
            "text_encoder_dtype": "fp32",
            "train_steps": 2,
            "lr": 1e-2,
            # With Adam's own epsilon, rounding in near-zero gradients becomes whole steps.
            "epsilon": 1e-3,
            **changes,
        }
        if family == "hunyuan_video":
            values["text_encoder_2_dtype"] = "fp32"
        if values.get("method") == "dpo":
            values["dataset_file"] = five_pairs
        if values.get("training_type", "lora") == "lora":
            values = {"rank": 4, "lora_alpha": 8, **values}
        return values

    return build


@pytest.fixture(scope="module")
def do_jobs() -> Iterator[Callable[..., Jobs]]:
    """`do_jobs(root, jobs, script=..., launcher=..., ...)`: `Jobs`, whose ranks live until the module's last test."""
    made: list[Jobs] = []

    def make(root: Path, jobs: dict[str, Any] | None = None, *, script: Path = RANK_SCRIPT, **how: Any) -> Jobs:
        made.append(Jobs(root, script, jobs, **how))
        return made[-1]

    yield make
    for jobs in made:
        jobs.close()
