"""Training state of a watched run: in training, finished, or ended otherwise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetrainers.rundir.lock import in_use, was_used
from finetrainers.utils.reading import read_jsonl

_STOPS = ("stopped", "stopped_by_guard")
_STATES = ("start", "finished", *_STOPS)


@dataclass(frozen=True)
class Training:
    """The state of a run.

    Attributes:
        may_go_on: whether further checkpoints may come.
        sentence: the state, for the user.
    """

    may_go_on: bool
    sentence: str


def training_state(run: Path, *, total_steps: int | None) -> Training:
    """Return the state of a run, from its lock and its records.

    Args:
        run: its directory, or a copy of it.
        total_steps: planned for it, or None if unknown.
    """
    records, events = (
        read_jsonl(path)[0] if path.is_file() else [] for path in (run / "metrics.jsonl", run / "events.jsonl")
    )
    steps = [int(record["step"]) for record in records if isinstance(record.get("step"), int | float)]
    step = f"step {steps[-1] if steps else 0}" + (f" of {total_steps}" if total_steps else "")
    last = next((kind for event in reversed(events) if (kind := event.get("event")) in _STATES), None)
    if in_use(run):
        return Training(True, f"the run is training, {step}")
    if last == "finished":
        return Training(False, f"the run has finished, {step}")
    if last in _STOPS:
        return Training(False, f"the run was stopped, {step}")
    if not was_used(run):
        return Training(True, f"this is a copy of a run, {step}")
    if last is None:
        return Training(False, "the run has not started")
    return Training(False, f"the run did not finish, and no process trains it now, {step}")
