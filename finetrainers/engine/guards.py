"""What must not become an update: a loss or gradient that is not a finite number."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run_dir import RunDirectory

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite. Nothing of the step was saved."""


class NonFiniteGuard:
    """Judges the numbers of a step before its update.

    They are averages over ranks, and one rank's NaN is the average's: every rank comes to the same decision.
    """

    def __init__(self, *, policy: str, limit: int, loss_scaling: bool, run_dir: RunDirectory) -> None:
        """Args:
        policy: `raise` or `skip`.
        limit: steps that may be skipped in all before it is an error after all.
        loss_scaling: whether fp16 gradients are scaled: then they overflow now and then, and the scaler skips those.
        run_dir: gets an event for each step that is not let through.
        """
        self.policy = policy
        self.limit = limit
        self.names = ("loss",) if loss_scaling else ("loss", "grad_norm")
        self.advice = (
            "No weight was changed. Continue from an earlier checkpoint with a lower --lr, longer --lr_warmup_steps or "
            "other data"
        )
        self.run_dir = run_dir
        self.skipped = 0

    def lets_through(self, step: int, record: Mapping[str, float]) -> bool:
        """Whether a step may update the weights.

        Raises:
            NonFiniteError: it may not, and the policy is to raise, or too many have been skipped.
        """
        found = {name: record[name] for name in self.names if name in record and not math.isfinite(record[name])}
        if not found:
            return True
        text = ", ".join(f"{name} {value}" for name, value in found.items())
        self.run_dir.event("nonfinite", step=step, skipped=self.policy == "skip", values=text)
        if self.policy == "raise":
            raise NonFiniteError(
                f"step {step}: {text}. {self.advice}, or leave such steps out with --on_nonfinite skip"
            )
        self.skipped += 1
        if self.skipped > self.limit:
            raise NonFiniteError(
                f"step {step}: {text}; {self.skipped} steps were not finite, more than --max_nonfinite_steps "
                f"{self.limit}. {self.advice}"
            )
        logger.warning("step %d skipped (%d of at most %d): %s", step, self.skipped, self.limit, text)
        return False
