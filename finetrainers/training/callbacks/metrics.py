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
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.reading import read_jsonl

from .base import Callback, Record

if TYPE_CHECKING:
    from ..state import TrainState

_PREFIX = "reward/"
#: The guards' own numbers count from the start of the run.
_GUARDS: Mapping[str, Summary] = {"nonfinite_steps": "last", "spikes": "last"}


def summarize_records(
    records: Sequence[Record], *, seconds: float, every: int, summaries: Mapping[str, Summary]
) -> Record:
    """Return a record of the steps since the last one: means, and for some names the last, least or greatest value.

    Args:
        records: of the steps. They are on the host already, so that nothing waits for them.
        seconds: that the steps took in all; `step_s` is their mean.
        every: steps of a whole interval. If it is longer than a step, the record also has `steps`, the number that it
            covers, and the greatest gradient norm.
        summaries: of the method's numbers; see `Method.summaries`.
    """
    kinds = {**_GUARDS, **summaries}
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            values[name].append(value)
    summary = {
        name: _summary(kinds.get(name) or kinds.get(f"{name.partition('/')[0]}/") or "mean", series)
        for name, series in values.items()
    }
    if every > 1:
        summary["steps"] = float(len(records))
        if "grad_norm" in values:
            summary["grad_norm_max"] = max(values["grad_norm"])
    summary["step_s"] = seconds / len(records)
    return summary


def _summary(kind: Summary, values: Sequence[float]) -> float:
    """Return one number for many, ignoring NaN and infinities, such as the score of clips that all failed."""
    if kind == "last":
        return values[-1]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return values[-1]
    return min(finite) if kind == "min" else max(finite) if kind == "max" else math.fsum(finite) / len(finite)


class MetricsFile(Callback):
    """Writer of metrics.jsonl, which gets every record without NaN and infinities: JSON has none."""

    def on_log(self, state: TrainState, record: Record) -> None:
        finite = {name: value for name, value in record.items() if math.isfinite(value)}
        state.run_dir.metrics({"time": round(time.time(), 3), **finite})


class RewardFiles(Callback):
    """Writer of `rewards/NAME.txt`, which gets the mean raw score of every logged rollout, a number a line."""

    _last = -1.0  # the rollout whose scores were written last; its other updates repeat them

    def on_start(self, state: TrainState) -> None:
        """Rewrite the files from metrics.jsonl, so that a resumed run has no scores of steps that will be redone."""
        self._last = -1.0
        folder = state.run_dir.root / "rewards"
        with state.run_dir.recording(folder):
            for stale in folder.glob("*.txt"):
                stale.unlink()
            if not state.run_dir.metrics_file.is_file():
                return
            lines_by_name: dict[str, list[str]] = defaultdict(list)
            for record in read_jsonl(state.run_dir.metrics_file)[0]:
                for name, value in self._scores(record).items():
                    lines_by_name[name].append(f"{value:.6g}\n")
            for name, lines in lines_by_name.items():
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
        """Return the scores of a rollout that has not been written yet; empty if it has."""
        rollout = record.get("rollout", self._last)
        if rollout == self._last:
            return {}
        self._last = rollout
        return {name: value for name, value in record.items() if name.startswith(_PREFIX)}

    def _path(self, state: TrainState, name: str) -> Path:
        # An address or a path in an option holds characters that no file name may.
        label = re.sub(r"[^\w.,=-]+", "-", name.removeprefix(_PREFIX))
        return state.run_dir.root / "rewards" / f"{label}.txt"
