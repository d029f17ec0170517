"""Detect stragglers: the rank that the others wait for, by a slow disk, a hot GPU or another job on its machine."""

from __future__ import annotations

import logging

from finetrainers.parallel.ranks import Ranks
from finetrainers.rundir.run_dir import RunDirectory

logger = logging.getLogger(__name__)

#: Share of a step that waiting may take before it counts.
_SHARE = 0.2
#: How many records in a row must show the same rank before it is named.
_PATIENCE = 3


class StragglerMonitor:
    """Compares how long the ranks have waited for each other: the slowest is the one that waited least.

    What is compared is the time in messages between the hosts, of which a step has one when its data is there and, where a
    step can be retried, one when this rank's gradients are computed. Under DDP nothing before it waits for another rank:
    buckets of gradients are sent and not waited for. It reports and changes nothing.
    """

    def __init__(self, *, parallel: Ranks, run_dir: RunDirectory) -> None:
        self.parallel = parallel
        self.run_dir = run_dir
        self._counted = 0.0
        self._slowest = -1
        self._in_a_row = 0

    def look(self, step: int, *, steps: int, step_s: float) -> dict[str, float]:
        """Who was the slowest since the last call, and how long the others waited; nothing for one rank.

        Every rank must call it.

        Args:
            step: the number of the step, for the event.
            steps: how many there were since the last call.
            step_s: how long each took.

        Returns:
            `slowest_rank` and `waiting_s`, the seconds of a step that the quickest rank waited more than the slowest.
        """
        if self.parallel.world_size == 1:
            return {}
        mine = self.parallel.waited_s - self._counted
        self._counted = self.parallel.waited_s
        microseconds = [0] * self.parallel.world_size
        microseconds[self.parallel.rank] = round(1e6 * mine)
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
                logger.warning("the others wait %.2f s of each step (%.2f s) for rank %d", waiting, step_s, slowest)
        return {"slowest_rank": float(slowest), "waiting_s": waiting}
