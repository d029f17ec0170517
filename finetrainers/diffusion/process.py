"""Noise processes: forward noising, prediction target, and conversion of predictions to x0 and noise.

Flow matching (Lipman et al. 2023; Esser et al. 2024, "SD3"):  x_sigma = (1 - sigma) x0 + sigma eps,  target eps - x0.
Variance preserving with v-prediction (Salimans & Ho 2022):     x_t = a_t x0 + s_t eps,  target v = a_t eps - s_t x0,
with a_t = sqrt(alpha_bar_t), s_t = sqrt(1 - alpha_bar_t). The x0-loss weighted by 1 / (1 - alpha_bar_t) that the
literature writes equals this plain v-loss: x0_hat - x0 = -s_t (v_hat - v).

Process time `t` is sigma in [0, 1] for flow matching and an integer index into alpha_bar for variance preserving.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


def expand(value: Tensor, like: Tensor) -> Tensor:
    """Return `[B]` or `[B, T]` in a shape that broadcasts against `[B, C, T, H, W]`."""
    if value.ndim == 2:
        return value[:, None, :, None, None]
    return value.view(-1, *[1] * (like.ndim - 1))


class Process(Protocol):
    """The interface of a noise process for methods; all tensors fp32."""

    #: Whether the flow options (shift, weighting schemes) apply to it.
    is_flow: bool

    def time_from_quantile(self, u: Tensor) -> Tensor:
        """Return the process time of noise-level quantiles u in [0, 1], 1 being pure noise."""
        ...

    def add_noise(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return noisy latents at time t."""
        ...

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the target of the network's prediction."""
        ...

    def x0_from(self, pred: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the clean latents implied by a prediction."""
        ...

    def eps_from(self, pred: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the noise implied by a prediction."""
        ...

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients of x0 and eps at time t, shaped like t."""
        ...


@dataclass(frozen=True)
class FlowMatching:
    """Rectified flow; t is sigma, the network's timestep is 1000 * sigma."""

    is_flow = True

    def time_from_quantile(self, u: Tensor) -> Tensor:
        return u

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return 1.0 - t, t

    def add_noise(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        sigma = expand(t.float(), x0)
        return (1.0 - sigma) * x0.float() + sigma * eps.float()

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return eps.float() - x0.float()

    def x0_from(self, pred: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return x_t.float() - expand(t.float(), x_t) * pred.float()

    def eps_from(self, pred: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return x_t.float() + (1.0 - expand(t.float(), x_t)) * pred.float()


@dataclass(frozen=True)
class VariancePreserving:
    """v-prediction over a checkpoint's alpha-bar table; t is an integer index, `[B]`."""

    alphas_cumprod: Tensor
    #: The table in fp32 by device: every loss needs it.
    _placed: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    is_flow = False

    def time_from_quantile(self, u: Tensor) -> Tensor:
        """Return the index of each quantile; uniform u gives every index equal probability."""
        n = self.alphas_cumprod.numel()
        return (u * n).floor().clamp(0, n - 1).long()

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        if t.device not in self._placed:
            self._placed[t.device] = self.alphas_cumprod.to(t.device, torch.float32)
        abar = self._placed[t.device][t]
        return abar.sqrt(), (1.0 - abar).sqrt()

    def add_noise(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        a, s = self.alpha_sigma(t)
        return expand(a, x0) * x0.float() + expand(s, x0) * eps.float()

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        a, s = self.alpha_sigma(t)
        return expand(a, x0) * eps.float() - expand(s, x0) * x0.float()

    def x0_from(self, pred: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        a, s = self.alpha_sigma(t)
        return expand(a, x_t) * x_t.float() - expand(s, x_t) * pred.float()

    def eps_from(self, pred: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        a, s = self.alpha_sigma(t)
        return expand(s, x_t) * x_t.float() + expand(a, x_t) * pred.float()
