"""The sampler's transitions for a group of a rollout: stochastic where its window says, deterministic elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from finetrainers.diffusion.policy import Kernel, Transitions, levels, only, transitions
from finetrainers.diffusion.process import Process

from .windows import StepWeight, Windows, step_weights


class StepTables:
    """Transitions, trained steps and step weights of every group; pure functions of rollout and slot."""

    def __init__(
        self,
        process: Process,
        times: Tensor,
        *,
        kernel: Kernel,
        eta: float,
        windows: Windows | None,
        weight: StepWeight,
    ) -> None:
        """Args:
        process, times: the noise process, and the process times of the steps, `[S]`.
        kernel, eta: kind and amount of noise of the stochastic steps.
        windows: which steps are stochastic; None for none.
        weight: how trained steps are weighted.
        """
        alpha, sigma = levels(process, times)
        self.windows = windows
        self.deterministic = transitions("ode", alpha, sigma, eta=0.0)
        self.stochastic = transitions(kernel, alpha, sigma, eta=eta)
        self.weights = torch.zeros(len(times), dtype=torch.float64)
        if windows is not None:
            self.weights = step_weights(weight, self.stochastic, alpha, sigma, over=windows.pool())

    @property
    def num_trained(self) -> int:
        """Trained steps of every clip."""
        return 0 if self.windows is None else self.windows.num_trained

    def of(self, rollout: int, slot: int) -> Transitions:
        """The group's transitions."""
        if self.windows is None:
            return self.deterministic
        return only(self.stochastic, self.deterministic, torch.tensor(self.windows.stochastic(rollout, slot)))

    def trained(self, rollout: int, slot: int) -> tuple[int, ...]:
        """The group's trained steps, ascending."""
        return () if self.windows is None else self.windows.trained(rollout, slot)
