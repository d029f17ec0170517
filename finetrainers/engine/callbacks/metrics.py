"""Records of a run, each of one step or several: metrics.jsonl, a text file per reward, and an optional tracker that can never stop training."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.sections import RunSection
from finetrainers.methods.base import Summary
from finetrainers.utils.files import read_jsonl, write_text_atomic

from .base import Callback, Record

if TYPE_CHECKING:
    from finetrainers.engine.state import TrainState

logger = logging.getLogger(__name__)

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


class Tracker(Callback):
    """Sends records to tensorboard, wandb or trackio through accelerate; the first failure ends tracking, not training."""

    def __init__(self, run: RunSection) -> None:
        self.run = run
        self.tracker: Any = None

    def on_start(self, state: TrainState) -> None:
        self._guard(state, lambda: self._open(state))

    def _open(self, state: TrainState) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        tracker_class = LOGGER_TYPE_TO_CLASS[self.run.report_to]
        place = {"logging_dir": str(state.run_dir.root / self.run.logging_dir)}
        self.tracker = tracker_class(
            self.run.tracker_name, **(place if tracker_class.requires_logging_directory else {})
        )
        if hasattr(self.tracker, "start"):
            self.tracker.start()
        # wandb and trackio name their runs; tensorboard has a folder.
        started = getattr(self.tracker, "tracker", None)
        name = getattr(started, "id", None) or getattr(started, "name", None)
        state.run_dir.tracker_run = None if name is None else str(name)
        settings = {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in state.config.flat().items()}
        settings.pop("hub_token")
        self.tracker.store_init_configuration(settings)

    def on_log(self, state: TrainState, record: Record) -> None:
        if self.tracker is not None:
            values = {k: v for k, v in record.items() if k != "step"}
            self._guard(state, lambda: self.tracker.log(values, step=state.step))

    def on_end(self, state: TrainState) -> None:
        if self.tracker is not None:
            self._guard(state, self.tracker.finish)

    def _guard(self, state: TrainState, action: Any) -> None:
        try:
            action()
        except Exception as error:
            # Whatever a tracker raises (network, quota, a missing package) must not cost a training run.
            self.tracker = None
            state.run_dir.event("tracker_failed", tracker=self.run.report_to, error=repr(error), step=state.step)
            logger.warning("tracker %s failed and is off from here on: %r", self.run.report_to, error)
