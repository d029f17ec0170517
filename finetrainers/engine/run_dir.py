"""The run directory: the resolved configuration, the environment, metrics and events of a run."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finetrainers.config.flags import is_secret
from finetrainers.config.load import dump_toml
from finetrainers.config.root import TrainConfig
from finetrainers.utils.files import append_jsonl, write_json_atomic, write_text_atomic

_PACKAGES = ("finetrainers", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "deepspeed",
             "bitsandbytes", "torchao")  # fmt: skip


class RunDirectory:
    """Paths and records of one run. Only the main process writes."""

    def __init__(self, root: Path, *, writes: bool) -> None:
        self.root = root
        self.writes = writes
        self.tracker_run: str | None = None  # the tracker's own name for this run, once it has one
        self.metrics_file = root / "metrics.jsonl"
        self.events_file = root / "events.jsonl"

    def start(self, config: TrainConfig, *, resumed_step: int) -> None:
        """Write the resolved configuration and the environment; drop metrics of steps that will be redone."""
        if not self.writes:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.root / "config.toml", dump_toml(config))
        write_json_atomic(self.root / "env.json", environment())
        self._keep_metrics(resumed_step)
        if resumed_step:
            self._set_aside_later_than(resumed_step)
        self.event("start", step=resumed_step)

    def rewind(self, step: int) -> None:
        """Within a run that goes back to a step: drop metrics of later ones, and put their samples aside."""
        self._keep_metrics(step)
        self._set_aside_later_than(step)

    def _keep_metrics(self, step: int) -> None:
        """Drop what was measured after a step; all of it where there is none."""
        if self.metrics_file.is_file():
            lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
            if lines and not _is_json(lines[-1]):  # cut off by a full disk
                del lines[-1]
            kept = [line for line in lines if json.loads(line)["step"] <= step] if step else []
            write_text_atomic(self.metrics_file, "".join(line + "\n" for line in kept))

    def _set_aside_later_than(self, step: int) -> None:
        """Rename checkpoints and samples of later steps: they belong to a continuation that is being replaced."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for folder in (self.root / "checkpoints", self.root / "samples"):
            for path in sorted(folder.glob("step-*")):
                if path.name.removeprefix("step-").isdigit() and int(path.name.removeprefix("step-")) > step:
                    aside = path.with_name(f"replaced-{stamp}-{path.name}")
                    path.rename(aside)
                    self.event("set_aside", path=str(aside))

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one line of metrics."""
        if self.writes:
            append_jsonl(self.metrics_file, record)

    def event(self, kind: str, **details: Any) -> None:
        """Append something that happened: a start, a checkpoint, a sample, a tracker that failed."""
        if self.writes:
            append_jsonl(self.events_file, {"time": round(time.time(), 3), "event": kind, **details})


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that decide over a run; None for those that are not installed."""
    return {package: _installed_version(package) for package in _PACKAGES}


@cache  # every checkpoint says it, and reading a package's metadata takes milliseconds
def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Versions and machine, for reproducing a run."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "command": without_secrets(sys.argv),
        "packages": package_versions(),
        "git": _git_commit(),
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line with tokens and keys blanked out."""
    kept: list[str] = []
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if kept and is_secret(kept[-1]) and "=" not in kept[-1] and not argument.startswith("--"):
            argument = "***"
        kept.append(f"{flag}=***" if equals and is_secret(flag) else argument)
    return kept


@cache
def _git_commit() -> str | None:
    """Commit of the checkout that the code runs from, if it is one."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            timeout=5,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
