"""Passes the records of a run to its guard against reward hacking, and warns or stops the run."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from finetrainers.rundir.find import checkpoints_dir, step_of
from finetrainers.utils.files import read_jsonl

from ..guards.hacking import HACKING_GUARD, Hacking, HackingGuard, hacking_text
from .base import Callback, Record

if TYPE_CHECKING:
    from ..state import TrainState

logger = logging.getLogger(__name__)


class HackingWatch(Callback):
    """Every rank sees the same records, and all act together. A warning is given once, until nothing is found any more."""

    def __init__(self, guard: HackingGuard) -> None:
        self.guard = guard

    def on_start(self, state: TrainState) -> None:
        """A checkpoint is saved before the evaluation of its step, which `metrics.jsonl` has."""
        path, last = state.run_dir.metrics_file, self.guard.last
        records = read_jsonl(path)[0] if state.step and state.parallel.is_main and path.is_file() else []
        for record in state.parallel.same_on_all([one for one in records if last < one["step"] <= state.step]):
            self.guard.take(record)

    def on_back(self, state: TrainState) -> None:
        self.on_start(state)

    def on_log(self, state: TrainState, record: Record) -> None:
        guard = self.guard
        if not guard.take(record):
            return
        found = state.parallel.same_on_all(guard.judge())  # the ranks must stop together
        if found is not None and (guard.rule.action == "stop" or not guard.is_found):
            self._act(state, found)
        guard.is_found = found is not None

    def _act(self, state: TrainState, found: Hacking) -> None:
        path = _checkpoint(state.run_dir.root, found.best_step)
        there = None if path is None else str(path)
        self.guard.way_back = there or "latest"
        state.run_dir.event("reward_hacking", step=state.step, **asdict(found), checkpoint=there)
        if state.parallel.is_main:
            logger.warning("step %d: reward hacking: %s", state.step, hacking_text(found, there))
        if self.guard.rule.action == "stop" and state.step < state.total_steps:
            state.requests.stop_by(HACKING_GUARD)


def _checkpoint(root: Path, step: int) -> Path | None:
    """The newest checkpoint that is not after a step."""
    found = [(number, path) for path in checkpoints_dir(root).glob("step-*") if (number := step_of(path)) is not None]
    return max((pair for pair in found if pair[0] <= step), default=(0, None))[1]
