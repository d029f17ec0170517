"""A clock that stands still while the process is suspended, by Ctrl-Z, `docker pause` or `scontrol suspend`."""

from __future__ import annotations

import time

TICK_S = 1.0


class RunningClock:
    """Clock of a loop that reads it at least every `TICK_S` seconds.

    More than two of these between two readings count as one: the loop itself did not run. So a time limit is not
    exceeded by a suspension, which says nothing about the work.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._suspended_s = 0.0

    def now(self) -> float:
        """Return seconds since some moment, without those of suspensions."""
        moment = time.monotonic()
        passed_s, self._last = moment - self._last, moment
        if passed_s > 2 * TICK_S:
            self._suspended_s += passed_s - TICK_S
        return moment - self._suspended_s
