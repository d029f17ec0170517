"""Records of a run: metrics.jsonl, a text file per reward, and an optional tracker that can never stop training."""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.sections import RunSection
from finetrainers.utils.files import read_jsonl, write_text_atomic

from .base import Callback, Record

if TYPE_CHECKING:
    from finetrainers.engine.state import TrainState

logger = logging.getLogger(__name__)

_PREFIX = "reward/"


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
        if not state.run_dir.writes:
            return
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
        if not state.run_dir.writes:
            return
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

    def __init__(self, run: RunSection, *, enabled: bool) -> None:
        self.run = run
        self.enabled = enabled
        self.tracker: Any = None

    def on_start(self, state: TrainState) -> None:
        if self.enabled:
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
