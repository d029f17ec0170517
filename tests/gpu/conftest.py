"""Tests on a device: on CUDA for what only a GPU shows, on the CPU so that their code runs, and can fail, everywhere.

On a machine with a GPU: `pytest -m gpu tests/gpu`, and the rest of the suite with `CUDA_VISIBLE_DEVICES= pytest -m "not
gpu"`. On the CPU a part of the cases is run, all of them with `FINETRAINERS_DEVICE_TESTS=all`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_devices import ALONE, Run, fp32, run_alone

# Read when CUDA starts: without it, cuBLAS is not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `alone` in a process of its own: one that fails would keep its model in this one's memory."""
    if pyfuncitem.get_closest_marker("alone") is None or os.environ.get(ALONE):
        return None
    run_alone(pyfuncitem.nodeid, rootdir=pyfuncitem.config.rootpath)
    return True


@pytest.fixture(autouse=True)
def _one_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where there is a GPU, cases on the CPU are those of the suite that hides it. Nothing stays on it."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("device") == "cpu" and torch.cuda.is_available():
        pytest.skip("runs with CUDA_VISIBLE_DEVICES=")
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels give the same in every run, for tests that compare bits; without such a kernel, the comparison decides.

    The backward pass of attention otherwise adds gradients in any order.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four clips of one bucket, each with a caption of its own."""
    from finetrainers.utils.video import write_mp4

    folder = tmp_path_factory.mktemp("clips")
    for k in range(4):
        frames = np.random.default_rng(k).integers(0, 255, (9, 8, 8, 3)).repeat(8, 1).repeat(8, 2)
        write_mp4(folder / f"{k}.mp4", frames.astype(np.uint8), fps=8)
        (folder / f"{k}.txt").write_text(f"pattern number {k}" + " moves" * k)
    return folder


@pytest.fixture(scope="session")
def start(tiny_repo: Callable[..., Path], clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`start(device, family, **options)`: a bf16 run of three steps on a device."""
    from finetrainers.config.load import load_config
    from finetrainers.plan.ready import get_ready
    from finetrainers.runs.run import run

    def build(device: str, family: str = "ltx_video", **changes: Any) -> Run:
        root = tmp_path_factory.mktemp("run")
        values: dict[str, Any] = {
            "model_name": family, "pretrained_model_name_or_path": str(tiny_repo(family)),
            "output_dir": str(root / "run"),
            "train_steps": 3, "lr": 1e-2, "optimizer": "adamw",
        }  # fmt: skip
        if changes.get("method") in ("grpo", "nft", "awm", "refl"):
            (root / "prompts.txt").write_text("a red ball\na blue cube\n")
            values |= {
                "prompts": str(root / "prompts.txt"), "reward": ["brightness", "contrast=0"], "rollout_size": "9x64x64",
                "prompts_per_step": 2, "num_generations": 4, "batch_size": 4, "sampling_steps": 4,
                "updates_per_rollout": 1,
            }  # fmt: skip
        else:
            values |= {"data_root": str(clips), "video_resolution_buckets": ["9x64x64"], "batch_size": 2}
        if changes.get("training_type", "lora") == "lora":
            values |= {"rank": 4, "lora_alpha": 8}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_CPU", str(device == "cpu").lower())
            state = run(get_ready(load_config(**values | changes)))
        assert state is not None
        assert state.parallel.device.type == device
        return Run(state, root / "run")

    return build


@pytest.fixture(scope="session")
def plain(start: Callable[..., Run]) -> Callable[..., Run]:
    """`plain(device, family, training_type, exact=False)`: a run that tests compare theirs with; in fp32 if it is
    exact."""
    made: dict[tuple[Any, ...], Run] = {}

    def build(device: str, family: str = "ltx_video", training_type: str = "lora", *, exact: bool = False) -> Run:
        key = (device, family, training_type, exact)
        if key not in made:
            precision = fp32(family) if exact else {}
            made[key] = start(device, family, training_type=training_type, checkpointing_steps=2, **precision)
        return made[key]

    return build
