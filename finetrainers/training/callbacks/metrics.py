"""Records of a run, each of one step or several: metrics.jsonl, and a text file per reward."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetrainers.methods.base import Summary
from finetrainers.utils.files import read_jsonl, write_text_atomic

from .base import Callback, Record

if TYPE_CHECKING:
    from ..state import TrainState

_PREFIX = "reward/"
#: The guards' own numbers count from the start of the run.
_GUARDS: Mapping[str, Summary] = {"nonfinite_steps": "last", "spikes": "last"}


def summarized(records: Sequence[Record], *, seconds: float, every: int, summaries: Mapping[str, Summary]) -> Record:
    """One record of the steps since the last one: means, and for some names the last, least or greatest value.

    Args:
        records: of the steps. They are on the host already, so that nothing waits for them.
        seconds: that the steps took in all; `step_s` is their mean.
        every: steps of a whole interval. Of longer ones than a step, the record also has `steps`, how many it covers, and
            the greatest gradient norm.
        summaries: of the method's numbers; see `Method.summaries`.
    """
    kinds = {**_GUARDS, **summaries}
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            values[name].append(value)
    found = {
        name: _summary(kinds.get(name) or kinds.get(f"{name.partition('/')[0]}/") or "mean", of_steps)
        for name, of_steps in values.items()
    }
    if every > 1:
        found["steps"] = float(len(records))
        if "grad_norm" in values:
            found["grad_norm_max"] = max(values["grad_norm"])
    found["step_s"] = seconds / len(records)
    return found


def _summary(kind: Summary, values: Sequence[float]) -> float:
    """One number for many. What is not a number, as the score of clips that all failed, leaves the others alone."""
    if kind == "last":
        return values[-1]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return values[-1]
    return min(finite) if kind == "min" else max(finite) if kind == "max" else math.fsum(finite) / len(finite)


class MetricsFile(Callback):
    """Appends every record to metrics.jsonl."""

    def on_log(self, state: TrainState, record: Record) -> None:
        state.run_dir.metrics({"time": round(time.time(), 3), **record})


class RewardFiles(Callback):
    """Appends the mean raw score of every logged rollout to `rewards/NAME.txt`, a number a line."""

    def __init__(self) -> None:
        self._last = -1.0  # the rollout whose scores were written last; its other updates repeat them

    def on_start(self, state: TrainState) -> None:
        """After a resume, the files hold what metrics.jsonl holds, and nothing of steps that will be redone."""
        self._last = -1.0
        folder = state.run_dir.root / "rewards"
        with state.run_dir.recording(folder):
            for stale in folder.glob("*.txt"):
                stale.unlink()
            if not state.run_dir.metrics_file.is_file():
                return
            found: dict[str, list[str]] = defaultdict(list)
            for record in read_jsonl(state.run_dir.metrics_file)[0]:
                for name, value in self._scores(record).items():
                    found[name].append(f"{value:.6g}\n")
            for name, lines in found.items():
                write_text_atomic(self._path(state, name), "".join(lines))

    def on_back(self, state: TrainState) -> None:
        self.on_start(state)

    def on_log(self, state: TrainState, record: Record) -> None:
        for name, value in self._scores(record).items():
            path = self._path(state, name)
            with state.run_dir.recording(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write(f"{value:.6g}\n")

    def _scores(self, record: Record) -> Record:
        """Scores of a rollout that has not been written yet."""
        rollout = record.get("rollout", self._last)
        if rollout == self._last:
            return {}
        self._last = rollout
        return {name: value for name, value in record.items() if name.startswith(_PREFIX)}

    def _path(self, state: TrainState, name: str) -> Path:
        # An address or a path in an option holds characters that no file name may.
        label = re.sub(r"[^\w.,=-]+", "-", name.removeprefix(_PREFIX))
        return state.run_dir.root / "rewards" / f"{label}.txt"
