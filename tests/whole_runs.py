"""Whole runs in this process, on clips made here, with tiny random models."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_family import required_options, short_clip
from safetensors.torch import load_file
from torch import Tensor

from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import families
from finetrainers.plan.ready import get_ready
from finetrainers.runs import run as runs
from finetrainers.training.state import TrainState
from finetrainers.utils.video import write_mp4

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").is_file() else None)


@dataclass(frozen=True)
class Run:
    """A finished run: its state, and what it left on disk."""

    state: TrainState
    root: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every record of metrics.jsonl."""
        return [json.loads(line) for line in (self.root / "metrics.jsonl").read_text().splitlines()]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Every record of events.jsonl."""
        return [json.loads(line) for line in (self.root / "events.jsonl").read_text().splitlines()]

    @property
    def steps_done(self) -> int:
        """Steps since the run was started or resumed last."""
        return self.state.step - [event["step"] for event in self.events if event["event"] == "start"][-1]

    def curve(self, *names: str) -> list[tuple[float, ...]]:
        """Step and the named numbers of every training record."""
        return [(r["step"], *(r[name] for name in names)) for r in self.metrics if "loss" in r]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The results on disk."""
        return results(self.root)


def results(directory: Path) -> dict[str, Tensor]:
    """Trained weights in a run directory or a checkpoint."""
    lora = directory / "pytorch_lora_weights.safetensors"
    if lora.is_file():
        return load_file(lora)
    return load_file(directory / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="session")
def make_clips(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_clips(count, frames=9, size=64)`: a folder of clips, each with a caption, and with negatives as further
    media."""
    built: dict[tuple[object, ...], Path] = {}

    def build(count: int, *, frames: int = 9, size: int = 64, media: tuple[str, ...] = ()) -> Path:
        key = (count, frames, size, media)
        if key in built:
            return built[key]
        folder = tmp_path_factory.mktemp("clips")
        y, x = np.mgrid[:size, :size].astype(np.float64)
        for k in range(count):
            pictures = [
                np.stack(
                    [
                        127 + 100 * np.sin((x + 4 * t) / (6 + k)),
                        127 + 100 * np.cos((y + 3 * t) / (5 + 2 * k)),
                        np.full_like(x, 40 + 30 * k),
                    ],
                    axis=-1,
                )
                for t in range(frames)
            ]
            pixels = np.stack(pictures).clip(0, 255).astype(np.uint8)
            write_mp4(folder / f"{k}.mp4", pixels, fps=8)
            for name in media:
                write_mp4(folder / name / f"{k}.mp4", 255 - pixels, fps=8)
            (folder / f"{k}.txt").write_text(f"pattern number {k} " + "moves " * (k + 1))
        built[key] = folder
        return folder

    return build


@pytest.fixture
def options(tiny_repo: Callable[..., Path], make_clips: Callable[..., Path], tmp_path: Path) -> Callable[..., dict]:
    """`options(family, clips=1, version=None, **changes)`: options of a short fp32 run."""

    def build(family: str = "ltx_video", *, clips: int = 1, version: str | None = None, **changes: Any) -> dict:
        repository = tiny_repo(family, version)
        model = ModelSection(model_name=family, pretrained_model_name_or_path=str(repository))
        facts = families()[family].facts_of(model)
        values: dict[str, Any] = {
            "model_name": family,
            "pretrained_model_name_or_path": str(repository),
            "data_root": str(make_clips(clips, media=facts.media)),
            "video_resolution_buckets": [f"{short_clip(family)}x64x64"],
            "output_dir": str(tmp_path / "run"),
            "transformer_dtype": "fp32",
            "vae_dtype": "fp32",
            "train_steps": 3,
            "lr": 1e-2,
            **required_options(facts),
        }
        parts = families()[family].facts.parts
        values |= {f"{part}_dtype": "fp32" for part in parts if part.startswith("text_encoder")}
        if changes.get("training_type", "lora") == "lora":
            values |= {"rank": 4, "lora_alpha": 8}
        return values | {name: value for name, value in changes.items() if value is not None}

    return build


@pytest.fixture
def run() -> Callable[..., Run]:
    """`run(**options)`: train in this process."""

    def start(**values: Any) -> Run:
        state = runs.run(get_ready(load_config(**values)))
        assert state is not None
        return Run(state, Path(values["output_dir"]))

    return start


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The command that connects to a server of this test's own, with keys of its own."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("sshd is not installed")
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = [
        f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/authorized",
        "StrictModes no", "UsePAM no", "PasswordAuthentication no", f"PidFile {folder}/pid", "PermitRootLogin yes",
        "KexAlgorithms curve25519-sha256",  # others take ten times as long
        "SetEnv SHLVL=2",  # bash reads no ~/.bashrc
    ]  # fmt: skip
    (folder / "config").write_text("\n".join(lines) + "\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    log = open(folder / "log", "w")  # noqa: SIM115 - the server's, for as long as it runs
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stderr=log)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            pytest.skip(f"sshd does not start here: {(folder / 'log').read_text()[-200:]}")
        options = ["UserKnownHostsFile=/dev/null", "StrictHostKeyChecking=no", "IdentitiesOnly=yes", "LogLevel=ERROR"]
        yield f"ssh -F none -p {port} -i {folder}/user " + " ".join(f"-o {one}" for one in options)
    finally:
        server.terminate()
        server.wait()
        log.close()


@pytest.fixture(autouse=True)
def _same_randomness() -> None:
    """No test depends on what ran before it."""
    torch.manual_seed(0)
