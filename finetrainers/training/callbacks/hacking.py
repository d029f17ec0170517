"""Callback that passes the records of a run to its guard against reward hacking, and warns or stops the run."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetrainers.rewards.hacking import RewardHacking, hacking_text
from finetrainers.rundir.find import checkpoints_dir, step_of
from finetrainers.utils.reading import read_jsonl

from ..guards.hacking import HACKING_GUARD, HackingGuard
from .base import Callback, Record

if TYPE_CHECKING:
    from ..state import TrainState

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class HackingWatch(Callback):
    """Callback that warns of reward hacking or stops the run; all ranks see the same records, and act together.

    It warns again only after the guard has found nothing in between.
    """

    guard: HackingGuard

    def on_start(self, state: TrainState) -> None:
        """Pass the records since the checkpoint, which was saved before the evaluation of its step."""
        path, last = state.run_dir.metrics_file, self.guard.last
        records = read_jsonl(path)[0] if state.step and state.parallel.is_main and path.is_file() else []
        for record in state.parallel.broadcast_object([r for r in records if last < r["step"] <= state.step]):
            self.guard.record(record)

    def on_back(self, state: TrainState) -> None:
        self.on_start(state)

    def on_log(self, state: TrainState, record: Record) -> None:
        guard = self.guard
        if not guard.record(record):
            return
        hacking = state.parallel.broadcast_object(guard.detect())  # the ranks must stop together
        if hacking is not None and (guard.rule.action == "stop" or not guard.is_found):
            self._act(state, hacking)
        guard.is_found = hacking is not None

    def _act(self, state: TrainState, hacking: RewardHacking) -> None:
        path = _checkpoint(state.run_dir.root, hacking.best_step)
        checkpoint = None if path is None else str(path)
        self.guard.way_back = checkpoint or "latest"
        state.run_dir.event("reward_hacking", step=state.step, **asdict(hacking), checkpoint=checkpoint)
        if state.parallel.is_main:
            logger.warning("step %d: reward hacking: %s", state.step, hacking_text(hacking, checkpoint))
        if self.guard.rule.action == "stop" and not state.is_last_step:
            state.requests.request_stop(HACKING_GUARD)


def _checkpoint(root: Path, step: int) -> Path | None:
    """Return the newest checkpoint that is not after a step, or None."""
    paths = [(number, path) for path in checkpoints_dir(root).glob("step-*") if (number := step_of(path)) is not None]
    return max((pair for pair in paths if pair[0] <= step), default=(0, None))[1]
