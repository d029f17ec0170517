"""Keep NaN and infinite losses and gradients out of the weights: raise, skip the update, or roll back."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.utils.failures import ExpectedError

logger = logging.getLogger(__name__)

_ADVICE = (
    "No weights were changed. Continue from an earlier checkpoint with a lower --lr, longer --lr_warmup_steps or "
    "other data"
)
#: Advice about a step before the first update.
AS_LOADED = (
    "The weights are still as loaded, so --lr is not the cause. Check the numbers in the model's config files, use "
    "bf16 or fp32 instead of fp16, or use other data"
)
#: What to do with a step: make its update, skip it, or roll the run back to its newest checkpoint.
Action = Literal["update", "skip", "rollback"]


class NonFiniteError(ExpectedError, RuntimeError):
    """Error for a step whose loss or gradient is NaN or infinite. Nothing of the step was saved."""


@dataclass
class NonFiniteGuard:
    """Guard that judges the numbers of a step before its update.

    They are averages over ranks, and one rank's NaN is the average's: every rank comes to the same decision.

    Attributes:
        policy: `raise`, `skip` or `rollback`.
        limit: steps that may be skipped or rolled back from in all; one more is an error.
        loss_scaling: whether fp16 gradients are scaled: then they overflow now and then, and the scaler skips those.
        run_dir: gets an event for each step whose update is not made.
        count: of these steps.
    """

    policy: str
    limit: int
    loss_scaling: bool
    run_dir: RunDirectory
    count: int = 0

    def choose_action(self, step: int, record: Mapping[str, float]) -> Action:
        """Decide what to do with a step.

        Raises:
            NonFiniteError: the step must not be an update, and the policy is to raise, or there were too many.
        """
        names = ("loss",) if self.loss_scaling else ("loss", "grad_norm")
        nonfinite = {name: record[name] for name in names if name in record and not math.isfinite(record[name])}
        if not nonfinite:
            return "update"
        text = ", ".join(f"{name} {value}" for name, value in nonfinite.items())
        self.run_dir.event("nonfinite", step=step, skipped=self.policy == "skip", values=text)
        advice = AS_LOADED if step == self.count + 1 else _ADVICE  # skipped steps count
        if self.policy == "raise":
            raise NonFiniteError(f"step {step}: {text}. {advice}, or skip such steps with --on_nonfinite skip")
        self.count += 1
        if self.count > self.limit:
            raise NonFiniteError(
                f"step {step}: {text}; {self.count} steps were not finite, more than --max_nonfinite_steps "
                f"{self.limit}. {advice}"
            )
        outcome = "skipped" if self.policy == "skip" else "not made"
        logger.warning("step %d %s (%d of at most %d): %s", step, outcome, self.count, self.limit, text)
        return "skip" if self.policy == "skip" else "rollback"
