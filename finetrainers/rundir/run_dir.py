"""The run directory: the resolved configuration, the environment, metrics and events of a run."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finetrainers.config.flags import is_secret
from finetrainers.config.load import dump_toml
from finetrainers.config.root import TrainConfig
from finetrainers.utils.files import append_jsonl, sweep_unfinished, write_json_atomic, write_text_atomic
from finetrainers.utils.reading import read_jsonl

from .find import checkpoints_dir, step_of
from .identity import take_identity

logger = logging.getLogger(__name__)

_PACKAGES = ("finetrainers", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "deepspeed",
             "bitsandbytes", "torchao")  # fmt: skip


class RunDirectory:
    """Paths and records of one run. Only the main process writes."""

    def __init__(self, root: Path, *, writes: bool) -> None:
        self.root = root
        self.writes = writes
        self.identity: str | None = None  # the run's id, once it has started; rank 0's
        self.tracker_runs: dict[str, str] = {}  # the trackers' own names for this run, once it has some
        self.recorded_step = -1  # the last step that was recorded before this start, of those that will be redone
        self.metrics_file = root / "metrics.jsonl"
        self.events_file = root / "events.jsonl"
        self._lost: set[Path] = set()  # records that could not be written

    @property
    def resume_command(self) -> str:
        """Command that continues this run with its settings from the newest checkpoint."""
        return self.resume_from("latest")

    def resume_from(self, checkpoint: str) -> str:
        """Return the command that continues this run with its settings from a checkpoint."""
        flags = (
            f"--config {shlex.quote(str(self.root / 'config.toml'))} --resume_from_checkpoint {shlex.quote(checkpoint)}"
        )
        # This process does not know the launcher's command line.
        return f"the same launcher with train.py {flags}" if "RANK" in os.environ else f"finetrainers train {flags}"

    def start(self, config: TrainConfig, *, resumed_step: int) -> None:
        """Write the run's identity, resolved configuration and environment; drop metrics of steps to be redone.

        Records of a run that had saved checkpoints, which were deleted since, are set aside, and the run is another.
        """
        if not self.writes:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, *self.root.glob("samples/*"), *self.root.glob("rollouts/*")):
            sweep_unfinished(folder)
        is_new = self._replaces_run()
        self.identity = take_identity(self.root, is_new=is_new)
        write_text_atomic(self.root / "config.toml", dump_toml(config))
        write_json_atomic(self.root / "env.json", environment())
        if is_new and self.metrics_file.exists():
            self._set_aside(self.metrics_file)
        self._keep_metrics(resumed_step)
        if resumed_step or is_new:
            self._set_aside_later_than(-1 if is_new else resumed_step)
        self.event("start", step=resumed_step)

    def _replaces_run(self) -> bool:
        """Return whether the last run in the directory has saved checkpoints or finished, and has no checkpoint now."""
        if any(step_of(path) is not None for path in checkpoints_dir(self.root).glob("*")):
            return False
        events = read_jsonl(self.events_file)[0] if self.events_file.is_file() else []
        has_saved = False
        for event in events:
            if event.get("event") == "start" and not event.get("step"):
                has_saved = False  # one that was killed before its first checkpoint begins again under its id
            has_saved |= event.get("event") in ("checkpoint", "finished")
        return has_saved

    def rewind(self, step: int) -> None:
        """Drop the metrics of later steps and set their samples aside, after a rollback."""
        self._keep_metrics(step)
        self._set_aside_later_than(step)

    def _keep_metrics(self, step: int) -> None:
        """Drop the metrics after a step, or all of them for step 0. Lines that are not records are put aside."""
        if not self.metrics_file.exists():
            return
        with self.recording(self.metrics_file):
            records, damaged = read_jsonl(self.metrics_file)
            complete = [record for record in records if _has_step(record)]
            damaged += [json.dumps(record).encode() for record in records if not _has_step(record)]
            if damaged:
                damaged_file = self.metrics_file.with_name(f"{self.metrics_file.name}.damaged")
                with open(damaged_file, "ab") as file:
                    file.writelines(line + b"\n" for line in damaged)
                logger.warning("%d damaged lines of %s were moved to %s", len(damaged), self.metrics_file, damaged_file)
            self.recorded_step = max((int(record["step"]) for record in complete), default=-1)
            earlier = [record for record in complete if step and record["step"] <= step]
            write_text_atomic(self.metrics_file, "".join(json.dumps(record) + "\n" for record in earlier))

    def _set_aside_later_than(self, step: int) -> None:
        """Rename checkpoints and samples of later steps: they belong to a continuation that is being replaced."""
        outputs = [(path, step_of(path)) for path in sorted(checkpoints_dir(self.root).glob("*"))]
        for path in sorted([*(self.root / "samples").glob("step-*"), *(self.root / "rollouts").glob("step-*")]):
            suffix = path.name.removeprefix("step-")
            outputs.append((path, int(suffix) if suffix.isascii() and suffix.isdecimal() else None))
        for path, output_step in outputs:
            if output_step is not None and output_step > step:
                self._set_aside(path)

    def _set_aside(self, path: Path) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        aside = _find_unused(path.with_name(f"replaced-{stamp}-{path.name.lstrip('.')}"))
        path.rename(aside)
        self.event("set_aside", path=str(aside))

    @contextlib.contextmanager
    def recording(self, path: Path) -> Iterator[None]:
        """Let a disk error within the block cost this file's records, not the run; the first one logs a warning.

        Raises:
            FileNotFoundError: the folder is gone, so that nothing else can be saved either.
        """
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if path not in self._lost:
                self._lost.add(path)
                logger.warning("%s cannot be written (%s); the run continues without this record", path, error.strerror)

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one line of metrics."""
        self._append(self.metrics_file, record)

    @property
    def tracker_run(self) -> str | None:
        """Names of this run at the trackers, or None if none has a name for it."""
        return ", ".join(self.tracker_runs.values()) or None

    def event(self, kind: str, **details: Any) -> None:
        """Append an event: a start, a checkpoint, a sample, the run at a tracker, its failure."""
        self._append(self.events_file, {"time": round(time.time(), 3), "event": kind, **details})

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        if self.writes:
            with self.recording(path):
                append_jsonl(path, record)


def _has_step(record: dict[str, Any]) -> bool:
    step = record.get("step")
    return isinstance(step, int | float) and not isinstance(step, bool) and math.isfinite(step)


def _find_unused(path: Path) -> Path:
    """Return the path, with a number appended if something has this name."""
    count, candidate = 1, path
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate


def package_versions() -> dict[str, str | None]:
    """Return the versions of the packages that affect a run, None for those that are not installed."""
    return {package: _installed_version(package) for package in _PACKAGES}


@cache  # every checkpoint stores it, and reading a package's metadata takes milliseconds
def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Return versions and machine, for reproducing a run."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "command": without_secrets(sys.argv),
        "packages": package_versions(),
        "git": _git_commit(),
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command line with tokens and keys blanked out."""
    cleaned: list[str] = []
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if cleaned and is_secret(cleaned[-1]) and "=" not in cleaned[-1] and not argument.startswith("--"):
            argument = "***"
        cleaned.append(f"{flag}=***" if equals and is_secret(flag) else argument)
    return cleaned


@cache
def _git_commit() -> str | None:
    """Return the commit of the checkout that the code runs from, or None if it is not a checkout."""
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
