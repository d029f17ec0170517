"""Detect stragglers: the rank that the others wait for, by a slow disk, a hot GPU or another job on its machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from finetrainers.parallel.ranks import DistributedContext
from finetrainers.rundir.run_dir import RunDirectory

logger = logging.getLogger(__name__)

#: Share of a step that waiting may take before it counts.
_SHARE = 0.2
#: Records in a row that must show the same rank before it is named.
_PATIENCE = 3


@dataclass
class StragglerMonitor:
    """Monitor of how long the ranks wait for each other: the slowest rank is the one that waits least.

    It compares the time in messages between the hosts: a step has one when its data is ready and, where a step can be
    retried, one when this rank's gradients are computed. Under DDP no earlier code waits for another rank: buckets of
    gradients are sent and not waited for. It reports and changes nothing.
    """

    parallel: DistributedContext
    run_dir: RunDirectory
    _counted = 0.0
    _slowest = -1
    _in_a_row = 0

    def check_interval(self, step: int, *, steps: int, step_s: float) -> dict[str, float]:
        """Return the slowest rank since the last call, and how long the others waited; every rank must call it.

        Args:
            step: the number of the step, for the event.
            steps: number of steps since the last call.
            step_s: seconds of each.

        Returns:
            `slowest_rank` and `waiting_s`, the seconds of a step that the quickest rank waited more than the slowest;
            empty for one rank.
        """
        if self.parallel.world_size == 1:
            return {}
        local_s = self.parallel.waited_s - self._counted
        self._counted = self.parallel.waited_s
        microseconds = [0] * self.parallel.world_size
        microseconds[self.parallel.rank] = round(1e6 * local_s)
        waited = self.parallel.max_on_host(microseconds)
        slowest, waiting = waited.index(min(waited)), 1e-6 * (max(waited) - min(waited)) / steps
        counts = waiting > _SHARE * step_s
        self._in_a_row = (self._in_a_row + 1 if slowest == self._slowest else 1) if counts else 0
        self._slowest = slowest
        if self._in_a_row == _PATIENCE:  # once, until it changes
            self.run_dir.event(
                "straggler", step=step, rank=slowest, waiting_s=round(waiting, 3), step_s=round(step_s, 3)
            )
            if self.parallel.is_main:
                logger.warning("rank %d is slow: other ranks wait %.2f s of each %.2f s step", slowest, waiting, step_s)
        return {"slowest_rank": float(slowest), "waiting_s": waiting}
