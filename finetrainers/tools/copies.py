"""The check that a directory may receive the copy of a run, judged by its contents. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from finetrainers.rundir.find import checkpoints_dir, step_of
from finetrainers.rundir.identity import read_identity
from finetrainers.rundir.manifest import MANIFEST
from finetrainers.utils.failures import Kind
from finetrainers.utils.files import file_sha256, open_regular
from finetrainers.utils.reading import MAX_RECORDS, read_bytes, read_jsonl
from finetrainers.utils.text import plural

#: Records of a run. Events are only appended, so that a copy has no event that the run does not have.
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"


def copy_problem(run: Path, target: Path, *, is_empty: bool) -> tuple[str, Kind] | None:
    """Return why a run must not be copied into a directory, as a predicate of it, and the kind, or None if it may be.

    Args:
        run: the directory of the run.
        target: the directory, or a local one with its `run.json`, records and manifests.
        is_empty: whether nothing is in the directory.
    """
    if is_empty:
        return None
    identity, target_identity = read_identity(run), read_identity(target)
    if target_identity is not None:
        if identity is None or target_identity.run != identity.run:
            return f"is the directory of another run than {run}; use another directory", "mismatch"
        if identity.is_copy and not target_identity.is_copy:
            return f"is the original run, and {run} is its copy; exchange the two", "conflict"
    events, target_events = _read_events(run), _read_events(target)
    foreign = len(target_events - events) if events else 0
    if foreign:
        extra = plural(foreign, "event")
        message = f"has {extra} that {run} does not have: it was trained itself, or is ahead of that run"
        return f"{message}; use another directory", "mismatch"
    if target_identity is None and not (
        target_events or _has_same_checkpoints(run, target) or _has_same_beginning(run, target)
    ):
        message = f"is neither empty nor a copy of {run}, and its files would be overwritten; use a new directory"
        return message, "occupied"
    return None


def _read_events(root: Path) -> set[str]:
    """Return the events of a run."""
    path = root / EVENTS
    return {repr(sorted(event.items(), key=str)) for event in read_jsonl(path)[0]} if path.is_file() else set()


def _has_same_checkpoints(run: Path, target: Path) -> bool:
    """Return whether both have a checkpoint, and all checkpoints that both have are the same."""
    run_manifests, target_manifests = _read_manifests(run), _read_manifests(target)
    common = run_manifests.keys() & target_manifests.keys()
    return bool(common) and all(run_manifests[name] == target_manifests[name] for name in common)


def _read_manifests(root: Path) -> Mapping[str, str]:
    """Return the SHA-256 of each checkpoint's manifest, by the checkpoint's name."""
    files = checkpoints_dir(root).glob(f"*/{MANIFEST}")
    return {file.parent.name: file_sha256(file) for file in files if step_of(file.parent) is not None}


def _has_same_beginning(run: Path, target: Path) -> bool:
    """Return whether the metrics of a directory are a beginning of the run's."""
    if not all((root / METRICS).is_file() for root in (run, target)):
        return False
    beginning = read_bytes(target / METRICS, limit=MAX_RECORDS)
    with open_regular(run / METRICS) as file:
        return bool(beginning) and file.read(len(beginning)) == beginning
