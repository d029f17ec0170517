"""Base class of callbacks, which watch a run, and may change gradients; called in the order of the list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..state import Sample, TrainState

#: One log record: `step` and named numbers, the same on every rank.
Record = dict[str, float]


class Callback:
    """Hooks of a run; override those you need. Every rank runs every hook.

        class StopWhenGood(Callback):
            def on_log(self, state, record):
                if record.get("loss", 1.0) < 0.05:
                    state.requests.finish = "a loss below 0.05"

        train(config, callbacks=[StopWhenGood()])

    Numbers that `on_start`, `on_step` or `on_samples` returns are logged as one record; every rank must return the same
    names.

    Attributes:
        samples: whether it samples or evaluates, and fulfills `state.requests.sample`.
    """

    samples = False

    def on_start(self, state: TrainState) -> Record | None:
        """Run before the first step of this process."""

    def on_gradients(self, state: TrainState) -> None:
        """Run in each step when `.grad` of the weights is complete: averaged over ranks, and not yet clipped."""

    def on_step(self, state: TrainState) -> Record | None:
        """Run after each optimizer step."""

    def on_log(self, state: TrainState, record: Record) -> None:
        """Run at every record: each `logging_steps` steps, and whenever a callback returns numbers."""

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> Record | None:
        """Run after samples of the validation or the evaluation are on disk, with those of this rank, perhaps none."""

    def on_back(self, state: TrainState) -> None:
        """Run after a rollback to an earlier step, which also truncates `metrics.jsonl`."""

    def on_stop(self, state: TrainState) -> None:
        """Run after the last step of this process, or when an exception ends the training."""

    def on_end(self, state: TrainState) -> None:
        """Run after the last step, when the results are on disk; or when the run was stopped, with a checkpoint."""
