"""Detect spikes: a loss or gradient norm far above its recent values. Only reported; training is unchanged."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from finetrainers.rundir.run_dir import RunDirectory

logger = logging.getLogger(__name__)

#: Numbers that are watched, and how many times the largest value of the window a spike exceeds: with one clip per step,
#: values differ by clip and noise level, so that a new largest value now and then is normal.
MARGINS = {"loss": 1.5, "grad_norm": 2.5}
#: Share of the window that must be filled before anything counts as a spike.
_ENOUGH = 0.5
#: The standard deviation is taken for at least this share of the mean: a series that hardly moves has no outliers.
_LEAST_SPREAD = 1e-3

#: Gradient norms below this are practically 0.
_SATURATED = 1e-6


class SpikeDetector:
    """Detector of spikes: values more than `sigma` standard deviations above the mean of the last `window` values.

    They must also be far above the largest of these (`MARGINS`). Mean and deviation are computed in fp64 from the
    window itself, without the value that is judged, so that no error builds up. A spike enters the window as the
    highest value that is not an outlier: it cannot hide later ones, and a series that stays on a higher level is after
    a while no longer called a spike.
    """

    def __init__(self, *, window: int, sigma: float, run_dir: RunDirectory) -> None:
        """Args:
        window: values to compare with.
        sigma: how many standard deviations make a spike; 0 finds none.
        run_dir: gets an event for each spike.
        """
        self.sigma = sigma
        self.run_dir = run_dir
        self.enough = max(2, math.ceil(_ENOUGH * window))
        self.recent: dict[str, deque[float]] = {name: deque(maxlen=window) for name in MARGINS}
        self.count = 0
        self._is_saturated = False

    def check_step(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Take a step's finite numbers, and return `spikes`, the number of steps with a spike, once there is one."""
        if not self.sigma:
            return {}
        spikes = [text for name in MARGINS if name in record and (text := self._take(name, record[name])) is not None]
        if spikes:
            self.count += 1
            text = ", ".join(spikes)
            self.run_dir.event("spike", step=step, values=text)
            logger.warning("step %d: spike: %s", step, text)
        self._warn_of_saturation(step)
        return {"spikes": float(self.count)} if self.count else {}

    def _warn_of_saturation(self, step: int) -> None:
        """Warn once if the gradients of many steps are practically 0: the loss has nothing to improve."""
        norms = self.recent["grad_norm"]
        if not self._is_saturated and len(norms) >= self.enough and max(norms) < _SATURATED:
            self._is_saturated = True
            logger.warning(
                "step %d: the gradient norm has been below %g for %d steps: the loss is saturated, and further steps "
                "hardly change the weights; stop the run, and compare earlier checkpoints",
                step, _SATURATED, len(norms),
            )  # fmt: skip

    def _take(self, name: str, value: float) -> str | None:
        """Add a value to its window, and return a description if it is a spike, or None."""
        recent = self.recent[name]
        if len(recent) < self.enough:
            recent.append(value)
            return None
        count = len(recent)
        mean, spread = _mean_and_spread(recent)
        spread = max(spread, _LEAST_SPREAD * abs(mean))
        bound = mean + self.sigma * spread
        largest = max(recent)
        recent.append(min(value, bound))
        bound = max(bound, MARGINS[name] * largest)
        if value <= bound:
            return None
        above = f"{(value - mean) / spread:.1f} sigma above" if spread else "above"
        return f"{name} {value:.4g} is {above} the mean {mean:.4g} of the last {count} steps"

    def state_dict(self) -> dict[str, Any]:
        """Return the windows and the count, as JSON values."""
        return {"count": self.count, **{name: list(recent) for name, recent in self.recent.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; from a longer window, take the newest values."""
        self.count = state.get("count", 0)
        for name, recent in self.recent.items():
            recent.clear()
            recent.extend(state.get(name, ()))


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of values."""
    mean = math.fsum(values) / len(values)
    return mean, math.dist(values, [mean] * len(values)) / math.sqrt(len(values))
