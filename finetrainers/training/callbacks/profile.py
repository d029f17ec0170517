"""A profile of some steps: a trace of their operations, a table of times, and on CUDA the history of memory."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from finetrainers.utils.failures import is_out_of_memory

from .base import Callback

if TYPE_CHECKING:
    from ..state import TrainState

logger = logging.getLogger(__name__)

#: Operations in the table.
_ROWS = 40


class StepProfile(Callback):
    """Profiler of the steps `first` to `last`; every rank writes files to `profile/` in the run directory.

    It starts a step early to warm up: CUDA's tools are set up in the first step that they see. On CUDA, memory is
    recorded from the first step of the process, so that an OOM until `last` leaves a snapshot with its history.
    """

    def __init__(self, steps: tuple[int, int]) -> None:
        self._first, self._last = steps
        self._profiler: profile | None = None
        self._is_over = False
        self._records_memory = False

    def on_start(self, state: TrainState) -> None:
        if not state.step < self._last <= state.total_steps:
            logger.warning(
                "--profile_steps %d:%d: this process trains steps %d to %d, so the profile is incomplete or missing",
                self._first, self._last, state.step + 1, state.total_steps,
            )  # fmt: skip
        self._is_over = state.step >= self._last
        self._records_memory = state.parallel.device.type == "cuda" and not self._is_over
        if self._records_memory:
            torch.cuda.memory._record_memory_history(stacks="python")
        self._start_if_due(state)

    def on_step(self, state: TrainState) -> None:
        if state.step >= self._last:
            self._finish(state)
        elif self._profiler is not None:
            self._profiler.step()
        else:
            self._start_if_due(state)

    def on_stop(self, state: TrainState) -> None:
        """Write the profile of steps so far; after an OOM, also the memory that was in use then."""
        error = sys.exc_info()[1]
        prefix = "out-of-memory-" if error is not None and is_out_of_memory(error) else ""
        self._finish(state, prefix=prefix)

    def _start_if_due(self, state: TrainState) -> None:
        upcoming = state.step + 1
        if self._is_over or upcoming < self._first - 1:
            return
        warm_up = int(upcoming < self._first)
        activities = {ProfilerActivity.CPU}
        if state.parallel.device.type == "cuda":
            activities.add(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            schedule=lambda step: ProfilerAction.WARMUP if step < warm_up else ProfilerAction.RECORD,
            record_shapes=True,
        )
        self._profiler.start()

    def _finish(self, state: TrainState, *, prefix: str = "") -> None:
        """Stop profiling and write the files; one that cannot be written does not end the run."""
        profiler, records_memory = self._profiler, self._records_memory
        self._profiler, self._records_memory, self._is_over = None, False, True
        if profiler is None and not records_memory:
            return
        directory, name = state.run_dir.root / "profile", f"steps-{self._first}-{self._last}-rank-{state.parallel.rank}"
        try:
            directory.mkdir(exist_ok=True)
            if records_memory:
                torch.cuda.memory._dump_snapshot(str(directory / f"{prefix}{name}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            if profiler is not None:
                profiler.stop()
                if profiler.current_action is not ProfilerAction.WARMUP:
                    profiler.export_chrome_trace(str(directory / f"{name}.json.gz"))
                    (directory / f"{name}.txt").write_text(_table(profiler, state), encoding="utf-8")
        except (OSError, RuntimeError) as error:
            logger.error("the profile in %s is incomplete: %s", directory, error)
            return
        state.run_dir.event("profile", step=state.step, path=str(directory))


def _table(profiler: profile, state: TrainState) -> str:
    """Return the operations that take most time, on the GPU if there is one."""
    device = "cuda" if state.parallel.device.type == "cuda" else "cpu"
    return profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=_ROWS, max_name_column_width=60)
