"""Records of a run: metrics.jsonl, a progress line, and an optional tracker that can never stop training."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .base import Callback, Record

if TYPE_CHECKING:
    from finetrainers.engine.trainer import Trainer

logger = logging.getLogger(__name__)


class MetricsFile(Callback):
    """Appends every record to metrics.jsonl."""

    def on_log(self, trainer: Trainer, record: Record) -> None:
        trainer.run_dir.metrics({"time": round(time.time(), 3), **record})


def memory_gib() -> float:
    """Peak device memory on an accelerator, else peak resident memory of this process, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class ProgressLine(Callback):
    """Step, average loss, learning rate, gradient norm, seconds a step, time left and memory.

    A live bar on a terminal; elsewhere one plain line, at most every `interval_s` seconds.
    """

    def __init__(self, *, enabled: bool, interval_s: float = 5.0, console: Console | None = None) -> None:
        self.enabled = enabled
        self.interval_s = interval_s
        self.console = console or Console(soft_wrap=True)
        self.recent: deque[float] = deque(maxlen=20)
        self.last_line = 0.0
        self.progress: Progress | None = None
        self.task: TaskID | None = None

    def on_start(self, trainer: Trainer) -> None:
        if self.enabled and self.console.is_terminal:
            self.progress = Progress(
                TextColumn("[bold]train"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[line]}"),
                console=self.console,
            )
            self.task = self.progress.add_task("train", total=trainer.total_steps, completed=trainer.step, line="")
            self.progress.start()

    def on_log(self, trainer: Trainer, record: Record) -> None:
        if not self.enabled:
            return
        if "step_s" not in record:
            values = "  ".join(f"{k} {v:.4g}" for k, v in record.items() if k != "step")
            self._print(f"step {trainer.step}: {values}")
            return
        if "loss" in record:
            self.recent.append(record["loss"])
        line = self._line(record)
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=trainer.step, line=line)
            if trainer.step == trainer.total_steps:
                self.progress.stop()
        elif time.monotonic() - self.last_line > self.interval_s or trainer.step == trainer.total_steps:
            self.last_line = time.monotonic()
            left = (trainer.total_steps - trainer.step) * record["step_s"]
            self._print(f"step {trainer.step}/{trainer.total_steps}  {line}  left {_duration(left)}")

    def _line(self, record: Record) -> str:
        # A step without micro-batches, or one whose update was left out.
        loss = "not finite, skipped" if "nonfinite_steps" in record else "nothing to learn"
        if "loss" in record:
            loss = f"loss {record['loss']:.4f} (avg {sum(self.recent) / len(self.recent):.4f})"
        norm = f"  grad {record['grad_norm']:.3g}" if "grad_norm" in record else ""
        return f"{loss}  lr {record['lr']:.2e}{norm}  {record['step_s']:.3g} s/step  mem {memory_gib():.1f} GiB"

    def _print(self, text: str) -> None:
        (self.progress.console if self.progress else self.console).print(text, highlight=False)

    def on_end(self, trainer: Trainer) -> None:
        if self.progress is not None:
            self.progress.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Tracker(Callback):
    """Sends records to tensorboard, wandb or trackio through accelerate; the first failure ends tracking, not training."""

    def __init__(self, *, name: str, project: str, logging_dir: str, enabled: bool) -> None:
        self.name = name
        self.project = project
        self.logging_dir = logging_dir
        self.enabled = enabled
        self.tracker: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if self.enabled:
            self._guard(trainer, lambda: self._open(trainer))

    def _open(self, trainer: Trainer) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        tracker_class = LOGGER_TYPE_TO_CLASS[self.name]
        if tracker_class.requires_logging_directory:
            self.tracker = tracker_class(self.project, logging_dir=str(trainer.run_dir.root / self.logging_dir))
        else:
            self.tracker = tracker_class(self.project)
        if hasattr(self.tracker, "start"):
            self.tracker.start()
        # wandb and trackio name their runs; tensorboard has a folder.
        started = getattr(self.tracker, "tracker", None)
        name = getattr(started, "id", None) or getattr(started, "name", None)
        trainer.run_dir.tracker_run = None if name is None else str(name)
        settings = {
            k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in trainer.config.flat().items()
        }
        settings.pop("hub_token")
        self.tracker.store_init_configuration(settings)

    def on_log(self, trainer: Trainer, record: Record) -> None:
        if self.tracker is not None:
            values = {k: v for k, v in record.items() if k != "step"}
            self._guard(trainer, lambda: self.tracker.log(values, step=trainer.step))

    def on_end(self, trainer: Trainer) -> None:
        if self.tracker is not None:
            self._guard(trainer, self.tracker.finish)

    def _guard(self, trainer: Trainer, action: Any) -> None:
        try:
            action()
        except Exception as error:
            # Whatever a tracker raises (network, quota, a missing package) must not cost a training run.
            self.tracker = None
            trainer.run_dir.event("tracker_failed", tracker=self.name, error=repr(error), step=trainer.step)
            logger.warning("tracker %s failed and is off from here on: %r", self.name, error)
