"""What tests on a device share: their cases, runs, comparisons, and a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

#: In the environment of a test that has a process of its own.
ALONE = "FINETRAINERS_TEST_ALONE"
TIMEOUT_S = 1800
_ALL_ON_CPU = os.environ.get("FINETRAINERS_DEVICE_TESTS") == "all"


def cases(*values: Any, on_cpu: int = 1) -> list[Any]:
    """Parameters `(device, *value)`: all values on CUDA, and the first ones on the CPU, where each takes time of every
    run."""
    found = []
    for number, value in enumerate(values):
        one = value if isinstance(value, tuple) else (value,)
        name = "-".join(map(str, one))
        if number < on_cpu or _ALL_ON_CPU:
            found.append(pytest.param("cpu", *one, id=f"cpu-{name}"))
        found.append(pytest.param("cuda", *one, id=f"cuda-{name}", marks=pytest.mark.gpu))
    return found


def devices(*, cpu: bool = True) -> list[Any]:
    """Parameters of `device`: CUDA, and the CPU where that takes less than a second."""
    return (["cpu"] if cpu or _ALL_ON_CPU else []) + [pytest.param("cuda", marks=pytest.mark.gpu)]


def run_alone(nodeid: str, *, rootdir: Path) -> None:
    """One test in a process of its own; it passes, fails and skips here as it does there."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-s", "-p", "no:cacheprovider", nodeid],
        cwd=rootdir, env={**os.environ, ALONE: "1"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    print(done.stdout)
    if done.returncode != 0:
        pytest.fail(done.stdout[-8000:] + done.stderr[-4000:], pytrace=False)
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED [1]")]
    if skipped:
        pytest.skip(skipped[0].partition(": ")[2])


@dataclass(frozen=True)
class Run:
    """A finished run: its state, and what it left on disk."""

    state: Any
    root: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / "events.jsonl").read_text().splitlines()]

    def curve(self, name: str = "loss") -> list[float]:
        """A number of every training step."""
        lines = [json.loads(line) for line in (self.root / "metrics.jsonl").read_text().splitlines()]
        return [record[name] for record in lines if name in record]

    @property
    def network(self) -> Any:
        return self.state.parallel.unwrap(self.state.transformer)

    @property
    def trained(self) -> dict[str, Tensor]:
        """Trained weights, on the host."""
        return {name: p.detach().cpu().clone() for name, p in self.network.named_parameters() if p.requires_grad}


def fp32(family: str = "ltx_video") -> dict[str, Any]:
    """Options of a run in which nothing is rounded."""
    second = {"text_encoder_2_dtype": "fp32"} if family == "hunyuan_video" else {}
    return {"transformer_dtype": "fp32", "vae_dtype": "fp32", "text_encoder_dtype": "fp32", **second}


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} differ, e.g. {different[:3]}"
