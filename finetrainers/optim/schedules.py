"""Learning rate schedules, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from diffusers.optimization import get_scheduler
from torch.optim import Optimizer

from finetrainers.config.sections import OptimizerSection


def lr_schedule(
    config: OptimizerSection, *, lr: float, total_steps: int, first_step: int = 0
) -> Callable[[int], float]:
    """Return the configured learning rate as a function of the optimizer step.

    With W warm-up steps, N = `total_steps` training steps, k steps since `first_step` and p = (k - W) / (N - W), the
    rate is multiplied for k < W by k / W, and from then on by: `constant_with_warmup` 1; `linear` 1 - p; `cosine` (1 +
    cos(pi p)) / 2; `cosine_with_restarts` with C cycles (1 + cos(pi (C p mod 1))) / 2; `polynomial` (1 - p)^power. All
    but the first are 0 at k = N, which is one past the last step. `constant` is 1 and ignores the warm-up. `bump` goes
    up from S to the peak P by a half cosine in W steps, down to 1 by another in C cooldown steps, and stays there.

    Diffusers computes all but two. Its `polynomial` ends at an absolute 1e-7 (refusing smaller learning rates), and
    divides by zero for W = N. It has no `bump`: that is the beginning of PyTorch's `OneCycleLR`, which can only be
    stepped, raises after its last step, and changes the momentum too.
    """
    warmup = config.lr_warmup_steps
    cooldown = warmup if config.lr_cooldown_steps is None else config.lr_cooldown_steps

    def polynomial(step: int) -> float:
        if step < warmup:
            return step / warmup
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup)) ** config.lr_power

    def bump(step: int) -> float:
        if step < warmup:
            return _half_cosine(config.lr_bump_start, config.lr_bump_peak, step / warmup)
        if step < warmup + cooldown:
            return _half_cosine(config.lr_bump_peak, 1.0, (step - warmup) / cooldown)
        return 1.0

    own: dict[str, Callable[[int], float]] = {"polynomial": polynomial, "bump": bump}
    factor = own.get(config.lr_scheduler)
    if factor is None:
        # The library returns its formula only as part of a scheduler, so one is made for an optimizer without weights.
        # `num_cycles` means restarts to it; its cosine keeps the half period that ends at zero.
        factor = get_scheduler(
            config.lr_scheduler,
            optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
            num_warmup_steps=warmup,
            num_training_steps=total_steps,
            num_cycles=config.lr_num_cycles,
        ).lr_lambdas[0]
    return lambda step: lr * factor(step - first_step)


def _half_cosine(first: float, last: float, share: float) -> float:
    """Interpolate between two values by a half cosine; `share` is the position in [0, 1]."""
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Schedule:
    """Learning rates of an optimizer's groups in each optimizer step.

    Attributes:
        lr_at: rate of optimizer step n, from 0, or the factor of the groups' own rates.
        own: rate of each group of a user's optimizer, which `lr_at` multiplies; None for a group that finds its rate by
            itself. Empty if `lr_at` is the rate of all groups.
    """

    lr_at: Callable[[int], float]
    own: Sequence[float | None] = ()

    def apply(self, optimizer: Optimizer, step: int) -> None:
        """Set the rates of a step. Torchao keeps them in tensors, which must stay the same tensors."""
        factor = self.lr_at(step)
        for group, rate in zip(optimizer.param_groups, self.own or repeat(1.0), strict=False):
            if rate is None:
                continue
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(factor * rate)
            else:
                group["lr"] = factor * rate

    def record(self, step: int) -> dict[str, float]:
        """Return the rates of a step for its record: of the first group, and of each further one that differs."""
        rates = {index: self.lr_at(step) * rate for index, rate in enumerate(self.own or (1.0,)) if rate is not None}
        names = {index: f"lr/{index}" if index else "lr" for index, rate in rates.items()}
        return {names[index]: rate for index, rate in rates.items() if not index or rate != rates.get(0)}


def group_rates(optimizer: Optimizer) -> list[float | None]:
    """Return the learning rates of an optimizer's groups."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [None if rate is None else float(rate) for rate in rates]
