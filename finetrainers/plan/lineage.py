"""Lineage: which run, and which of its checkpoints, the first weights of a run come from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetrainers.models.registry import files_digest
from finetrainers.rundir.find import checkpoints_dir, step_of
from finetrainers.rundir.identity import read_identity
from finetrainers.rundir.manifest import MANIFEST, seal_of
from finetrainers.utils.files import read_jsonl

from .initial_weights import InitialWeights

#: The event that says what a run began from.
BEGAN_FROM = "began_from"
_EVENTS = "events.jsonl"
#: Longest chain of runs that is followed.
_MOST = 100


def lineage_of(root: Path, *, checkpoint: Path | None, initial: InitialWeights | None) -> dict[str, Any] | None:
    """Return what a run begins from, for its records, or None if that is the model's own weights or its own checkpoint.

    Args:
        root: the run's directory.
        checkpoint: which it resumes from.
        initial: the weights of `init_from`.
    """
    if checkpoint is not None:
        is_own = checkpoint.resolve().parent == checkpoints_dir(root).resolve()
        return None if is_own else {"load": "state", **origin_of(checkpoint)}
    return None if initial is None else {"load": initial.kind, **origin_of(initial.path)}


def origin_of(path: Path) -> dict[str, Any]:
    """Where weights come from, as far as that is known.

    `digest` names the checkpoint at this path, or the weight files; `run`, `run_id`, `step` and `checkpoint` say which run they
    are of, and the step and SHA-256 of its checkpoint with the same weights.
    """
    path = path.resolve()
    folders = [folder for folder in (path, *path.parents) if folder.is_dir()]
    run = next((folder for folder in folders[:5] if (folder / _EVENTS).is_file()), None)
    checkpoint = next((folder for folder in folders[:3] if (folder / MANIFEST).is_file()), None)
    found: dict[str, Any] = {"path": str(path), "digest": digest_of(path)}
    if run is None:
        return found
    step = _last_step(run) if checkpoint is None else step_of(checkpoint)
    if checkpoint is None and step is not None:
        checkpoint = checkpoints_dir(run) / f"step-{step}"
    seal = None if checkpoint is None else seal_of(checkpoint)
    identity = read_identity(run)
    return {**found, "run": str(run), "run_id": identity and identity.run, "step": step, "checkpoint": seal}


def digest_of(path: Path) -> str | None:
    """A short name of a checkpoint, or of weight files by their sizes and ends; None: there are none."""
    if (path / MANIFEST).is_file():
        seal = seal_of(path)
        return None if seal is None else seal[:12]
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return files_digest(files) if files and all(file.is_file() for file in files) else None


def _last_step(run: Path) -> int | None:
    """The step of a run's result; None where it has not said that it is finished."""
    steps = [event.get("step") for event in _events(run) if event.get("event") == "finished"]
    return steps[-1] if steps else None


def began_from(run: Path) -> Mapping[str, Any] | None:
    """What a run began from, by its records; None: the model's own weights."""
    found: Mapping[str, Any] | None = None
    for event in _events(run):
        if event.get("event") == BEGAN_FROM:
            found = event
        elif event.get("event") == "start" and not event.get("step"):  # a new run in the same directory
            found = None
    return found


def ancestors(run: Path) -> Sequence[Mapping[str, Any]]:
    """What a run began from, what the run of those weights began from, and so on, as far as their directories are there."""
    found: list[Mapping[str, Any]] = []
    there: str | Path | None = run
    while there is not None and len(found) < _MOST:
        origin = began_from(Path(there))
        if origin is None:
            break
        found.append(origin)
        there = None if _is_other_run(origin) else origin.get("run")
    return found


def _is_other_run(origin: Mapping[str, Any]) -> bool:
    """Return whether the directory that weights came from is that of another run by now."""
    then, now = origin.get("run_id"), read_identity(Path(str(origin.get("run"))))
    return then is not None and now is not None and now.run != then


def _events(run: Path) -> list[dict[str, Any]]:
    path = run / _EVENTS
    return read_jsonl(path)[0] if path.is_file() else []
