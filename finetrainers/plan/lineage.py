"""Lineage: the run and checkpoint that the first weights of a run come from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetrainers.models.registry import files_digest
from finetrainers.rundir.find import checkpoints_dir, step_of
from finetrainers.rundir.identity import read_identity
from finetrainers.rundir.manifest import MANIFEST, seal_of
from finetrainers.utils.files import names_existing
from finetrainers.utils.reading import read_jsonl

from .initial_weights import InitialWeights

#: The event that records the origin of a run.
BEGAN_FROM = "began_from"
_EVENTS = "events.jsonl"
#: Maximum length of a chain of runs.
_MAX_RUNS = 100


def find_lineage(root: Path, *, checkpoint: Path | None, initial: InitialWeights | None) -> dict[str, Any] | None:
    """Return a run's origin for its records, or None if it is the model's own weights or the run's own checkpoint.

    Args:
        root: the run's directory.
        checkpoint: the one that it resumes from.
        initial: the weights of `init_from`.
    """
    if checkpoint is not None:
        is_own = checkpoint.resolve().parent == checkpoints_dir(root).resolve()
        return None if is_own else {"load": "state", **read_origin(checkpoint)}
    return None if initial is None else {"load": initial.kind, **read_origin(initial.path)}


def read_origin(path: Path) -> dict[str, Any]:
    """Return the origin of weights, as far as it is known.

    `digest` names the checkpoint at this path, or the weight files; `run`, `run_id`, `step` and `checkpoint` name the
    run that made them, and the step and SHA-256 of its checkpoint with the same weights.
    """
    path = path.resolve()
    folders = [folder for folder in (path, *path.parents) if folder.is_dir()]
    run = next((folder for folder in folders[:5] if (folder / _EVENTS).is_file()), None)
    checkpoint = next((folder for folder in folders[:3] if (folder / MANIFEST).is_file()), None)
    origin: dict[str, Any] = {"path": str(path), "digest": short_digest(path)}
    if run is None:
        return origin
    if checkpoint is None:
        steps = [event.get("step") for event in _read_events(run) if event.get("event") == "finished"]
        step = steps[-1] if steps else None
        checkpoint = None if step is None else checkpoints_dir(run) / f"step-{step}"
    else:
        step = step_of(checkpoint)
    seal = None if checkpoint is None else seal_of(checkpoint)
    identity = read_identity(run)
    return {**origin, "run": str(run), "run_id": identity and identity.run, "step": step, "checkpoint": seal}


def short_digest(path: Path) -> str | None:
    """Return a short name of a checkpoint, or of weight files by their sizes and ends, or None if there are none."""
    if (path / MANIFEST).is_file():
        seal = seal_of(path)
        return None if seal is None else seal[:12]
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return files_digest(files) if files and all(file.is_file() for file in files) else None


def began_from(run: Path) -> Mapping[str, Any] | None:
    """Return the recorded origin of a run, or None if it began from the model's own weights."""
    origin: Mapping[str, Any] | None = None
    for event in _read_events(run):
        if event.get("event") == BEGAN_FROM:
            origin = event
        elif event.get("event") == "start" and not event.get("step"):  # a new run in the same directory
            origin = None
    return origin


def ancestors(run: Path) -> Sequence[Mapping[str, Any]]:
    """Return the origin of a run, the origin of that run, and so on, as far as their directories exist."""
    origins: list[Mapping[str, Any]] = []
    folder: Path | None = run
    while folder is not None and len(origins) < _MAX_RUNS and (origin := began_from(folder)) is not None:
        origins.append(origin)
        source = str(origin.get("run"))
        folder = Path(source) if names_existing(source, folder=True) and not _has_other_run(origin) else None
    return origins


def _has_other_run(origin: Mapping[str, Any]) -> bool:
    """Return whether the directory that weights came from now belongs to another run."""
    then, now = origin.get("run_id"), read_identity(Path(str(origin.get("run"))))
    return then is not None and now is not None and now.run != then


def _read_events(run: Path) -> list[dict[str, Any]]:
    path = run / _EVENTS
    return read_jsonl(path)[0] if path.is_file() else []
