"""What a watch waits for: whether its run is in training, has finished, or has ended otherwise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetrainers.rundir.lock import in_use, was_used
from finetrainers.utils.files import read_jsonl

_STOPS = ("stopped", "stopped_by_guard")
_ENDS = ("finished", *_STOPS)


@dataclass(frozen=True)
class Training:
    """The state of a run.

    Attributes:
        may_go_on: whether further checkpoints are to be expected.
        sentence: the state in words.
    """

    may_go_on: bool
    sentence: str


def training_of(run: Path, *, total_steps: int | None) -> Training:
    """The state of a run, by its lock and its records.

    Args:
        run: its directory, or a copy of it.
        total_steps: that it is to have; None: not known.
    """
    records = read_jsonl(run / "metrics.jsonl")[0] if (run / "metrics.jsonl").is_file() else []
    events = read_jsonl(run / "events.jsonl")[0] if (run / "events.jsonl").is_file() else []
    steps = [int(one["step"]) for one in records if isinstance(one.get("step"), int | float)]
    step = f"step {steps[-1] if steps else 0}" + (f" of {total_steps}" if total_steps else "")
    last = next((one for one in reversed(events) if one.get("event") in (*_ENDS, "start")), None)
    if in_use(run):
        return Training(True, f"the run is in training, {step}")
    if last is not None and last["event"] == "finished":
        return Training(False, f"the run has finished, {step}")
    if last is not None and last["event"] in _STOPS:
        return Training(False, f"the run was stopped, {step}")
    if not was_used(run):
        return Training(True, f"this is a copy of a run, {step}")
    if last is None:
        return Training(False, "the run has not begun")
    return Training(False, f"no process trains the run now, which did not finish, {step}")
