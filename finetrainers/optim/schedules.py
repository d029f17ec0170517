"""Learning rate schedules, counted in optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers.optimization import get_scheduler
from torch.optim import Optimizer

from finetrainers.config.sections import OptimizerSection


def lr_schedule(
    config: OptimizerSection, *, lr: float, total_steps: int, first_step: int = 0
) -> Callable[[int], float]:
    """The configured learning rate as a function of the optimizer step.

    With W warm-up steps, N = `total_steps` training steps, k steps since `first_step` and p = (k - W) / (N - W), the rate
    is multiplied for k < W by k / W, and from then on by: `constant_with_warmup` 1; `linear` 1 - p; `cosine`
    (1 + cos(pi p)) / 2; `cosine_with_restarts` with C cycles (1 + cos(pi (C p mod 1))) / 2; `polynomial` (1 - p)^power.
    All but the first are 0 at k = N, which is one past the last step. `constant` is 1 and ignores the warm-up.

    Diffusers computes all but `polynomial`: its version ends at an absolute 1e-7 (refusing smaller learning rates),
    and divides by zero for W = N.
    """
    warmup = config.lr_warmup_steps

    def polynomial(step: int) -> float:
        if step < warmup:
            return step / warmup
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup)) ** config.lr_power

    factor: Callable[[int], float] = polynomial
    if config.lr_scheduler != "polynomial":
        # The library hands its formula out only as part of a scheduler, so one is made for an optimizer of nothing.
        # `num_cycles` means restarts to it; its cosine keeps the half period that ends at zero.
        factor = get_scheduler(
            config.lr_scheduler,
            optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
            num_warmup_steps=warmup,
            num_training_steps=total_steps,
            num_cycles=config.lr_num_cycles,
        ).lr_lambdas[0]
    return lambda step: lr * factor(step - first_step)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group. Torchao keeps it in a tensor, which must stay the same tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
