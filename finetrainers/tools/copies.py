"""Whether a directory may get the copy of a run, judged by what is there. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from finetrainers.rundir.find import checkpoints_dir, step_of
from finetrainers.rundir.identity import read_identity
from finetrainers.rundir.manifest import MANIFEST
from finetrainers.utils.files import file_sha256, read_jsonl
from finetrainers.utils.text import plural

#: Records of a run. Events are only ever appended, so that a copy has no event that the run does not have.
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"


def copy_problem(run: Path, there: Path, *, is_empty: bool) -> str | None:
    """Return why a run must not be copied into a directory, as the end of a sentence about it, or None if it may be.

    Args:
        run: the directory of the run.
        there: the directory, or one with its `run.json`, records and manifests.
        is_empty: whether nothing is in the directory.
    """
    if is_empty:
        return None
    identity, its = read_identity(run), read_identity(there)
    if its is not None and (identity is None or its.run != identity.run):
        return f"is the directory of another run than {run}; give another directory"
    if its is not None and identity is not None and identity.is_copy and not its.is_copy:
        return f"is the directory of the run of which {run} is a copy; exchange the two"
    events, its_events = _events(run), _events(there)
    foreign = len(its_events - events) if events else 0
    if foreign:
        what = plural(foreign, "event")
        return (
            f"has {what} that {run} does not have: it was trained itself, or is ahead of that; give another directory"
        )
    if its is None and not (its_events or _has_same_checkpoints(run, there) or _has_same_beginning(run, there)):
        return f"is neither empty nor a copy of {run}, and its files would be overwritten; give a new directory"
    return None


def _events(root: Path) -> set[str]:
    """Return what has happened in a run."""
    path = root / EVENTS
    return {repr(sorted(one.items(), key=str)) for one in read_jsonl(path)[0]} if path.is_file() else set()


def _has_same_checkpoints(run: Path, there: Path) -> bool:
    """Return whether both have a checkpoint, and every one that both have is the same."""
    ours, theirs = _manifests(run), _manifests(there)
    common = ours.keys() & theirs.keys()
    return bool(common) and all(ours[name] == theirs[name] for name in common)


def _manifests(root: Path) -> Mapping[str, str]:
    """Return the SHA-256 of each checkpoint's manifest, by the checkpoint's name."""
    files = checkpoints_dir(root).glob(f"*/{MANIFEST}")
    return {file.parent.name: file_sha256(file) for file in files if step_of(file.parent) is not None}


def _has_same_beginning(run: Path, there: Path) -> bool:
    """Return whether the metrics of a directory are a beginning of the run's."""
    ours, theirs = run / METRICS, there / METRICS
    if not (ours.is_file() and theirs.is_file()):
        return False
    beginning = theirs.read_bytes()
    with open(ours, "rb") as file:
        return bool(beginning) and file.read(len(beginning)) == beginning
