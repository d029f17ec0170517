"""The sampler as a stochastic policy: Gaussian transitions from one noise level to the next, and their densities.

Every kernel here moves from x = a x0 + s e to a Gaussian around `c_x0 x0 + c_e e`, where x0 and e are the clean latents
and the noise that the network sees in x. So a kernel is three numbers per step, functions of the noise levels alone,
and flow matching (a = 1 - s) and variance preserving (a^2 + s^2 = 1) share all of them:

    ode     c_x0 = a',  c_e = s',  no noise: the Euler step of flow matching, DDIM of variance preserving
    ddim    std = eta (s'/s) sqrt(s^2 - (a/a')^2 s'^2),  c_e = sqrt(s'^2 - std^2)   (Song et al. 2021, eq. 16)
    cps     std = s' sin(eta pi/2),  c_e = sqrt(s'^2 - std^2)                       (Flow-CPS; not the ODE's marginal)
    dance   std = eta sqrt(-dr)                                                     (DanceGRPO)
    flow    std = eta sqrt(r / (1 - r)) sqrt(-dr), r = 1 as the level after it      (Flow-GRPO)

A level above 1 - 1e-5 counts as 1 there: multistep solvers start at 0.999999, where that rate would be in the hundreds.

The last two are Euler-Maruyama steps of the reverse SDE of rectified flow, with noise rate g = std / sqrt(-dr) and
c_e = r' + g^2 dr / (2 r). They are published for rectified flow only; a process with other coefficients is brought to
it by x / (a + s), r = s / (a + s), and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from finetrainers.utils.device import to_device
from finetrainers.utils.failures import InputError

from .process import Process, expand

Kernel = Literal["flow", "dance", "cps", "ddim", "ode"]

#: Levels above this are pure noise: solvers leave the gap so as not to take the logarithm of 0.
_PURE_NOISE = 1 - 1e-5
#: Latents have a deviation of about 1, so a step that adds twice that is a mistake, and makes clips explode.
_LARGEST_STD = 2.0


class Transitions(NamedTuple):
    """Coefficients of S steps, `[S]` fp64: the next latent is `x0 * x0_hat + eps * eps_hat + std * noise`."""

    x0: Tensor
    eps: Tensor
    std: Tensor

    def at_steps(self, step: Tensor, device: torch.device) -> Transitions:
        """Return the coefficients of steps, one per clip, `[B]` fp32 on the device."""
        return Transitions(*(to_device(c[step.cpu()].float(), device) for c in self))


def levels(process: Process, times: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma of the process times `[S]` and of the clean end, `[S + 1]` fp64."""
    alpha, sigma = (c.double().cpu() for c in process.alpha_sigma(times))
    return torch.cat([alpha, alpha.new_ones(1)]), torch.cat([sigma, sigma.new_zeros(1)])


def transitions(
    kernel: Kernel, alpha: Tensor, sigma: Tensor, *, eta: float, noisy: Sequence[int] | None = None
) -> Transitions:
    """Return the coefficients of every step between consecutive noise levels, from noise to clean.

    The last step is always the deterministic one: noise added there would be seen, and its density is that of a point.

    Args:
        kernel: family of transitions.
        alpha, sigma: `[S + 1]` fp64, the last being 1 and 0.
        eta: amount of noise, in the kernel's own units; 0 gives the deterministic step.
        noisy: steps that may get noise, by default all; the amount is not checked at others.

    Raises:
        ValueError: the levels do not fall, or eta is above the limit of the kernel or of these levels.
    """
    ratio = sigma / (alpha + sigma)
    if not bool((ratio[1:] < ratio[:-1]).all()) or float(ratio[0]) > 1:
        raise ValueError(f"noise levels must fall, from at most 1, got {[round(r, 6) for r in ratio.tolist()]}")
    if kernel in ("cps", "ddim") and not 0 <= eta <= 1:
        raise ValueError(f"eta of {kernel!r} must be in [0, 1], got {eta}")
    a, s, r = alpha[:-1], sigma[:-1], ratio[:-1]
    next_a, next_s, next_r = alpha[1:], sigma[1:], ratio[1:]
    fall = r - next_r
    scale = next_a + next_s
    if kernel in ("dance", "flow"):
        # At pure noise Flow-GRPO's rate is infinite; the reference takes the level of the next step there.
        below_one = torch.where(r < _PURE_NOISE, r, next_r)
        rate = torch.full_like(r, eta) if kernel == "dance" else eta * torch.sqrt(r / (1 - below_one))
        std = scale * rate * torch.sqrt(fall)
        eps = next_s - scale * rate**2 * fall / (2 * r)
    else:
        if kernel == "ddim":
            std = eta * (next_s / s) * torch.sqrt((s**2 - (a / next_a) ** 2 * next_s**2).clamp_min(0))
        else:
            std = next_s * (math.sin(eta * math.pi / 2) if kernel == "cps" else 0.0)
        # Exactly s' where there is no noise, without the rounding of a square and its root.
        eps = torch.where(std > 0, torch.sqrt((next_s**2 - std**2).clamp_min(0)), next_s)
    std[-1], eps[-1] = 0.0, next_s[-1]
    _check_std(kernel, std, sigma, eta=eta, steps=range(len(std)) if noisy is None else noisy)
    return Transitions(x0=next_a.clone(), eps=eps, std=std)


def step_lengths(alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return the decrease of the noise level r = s / (a + s) at every step, `[S]`, from levels `[S + 1]`."""
    ratio = sigma / (alpha + sigma)
    return ratio[:-1] - ratio[1:]


def _check_std(kernel: Kernel, std: Tensor, sigma: Tensor, *, eta: float, steps: Sequence[int]) -> None:
    """Raise an error for noise that would destroy every clip.

    Raises:
        ValueError: the std of one of these steps is negative, above 2, or not a number.
    """
    invalid = [step for step in steps if not 0 <= float(std[step]) <= _LARGEST_STD]
    if invalid:
        step = invalid[0]
        raise InputError(
            f"sampler {kernel!r} with eta {eta:g} adds noise of std {float(std[step]):.4g} at step {step + 1} of "
            f"{len(std)} (noise level {float(sigma[step]):.6g} to {float(sigma[step + 1]):.6g}); latents have a std of "
            f"about 1, so at most {_LARGEST_STD:g} makes sense: use a lower --eta, another --sampler, or more "
            "--sampling_steps",
            "too_large",
        )


def only(stochastic: Transitions, deterministic: Transitions, steps: Tensor) -> Transitions:
    """Return the stochastic coefficients at `steps` and the deterministic ones elsewhere."""
    chosen = torch.zeros_like(stochastic.std, dtype=torch.bool)
    chosen[steps] = True
    return Transitions(*(torch.where(chosen, a, b) for a, b in zip(stochastic, deterministic, strict=True)))


def transition_mean(process: Process, prediction: Tensor, x: Tensor, t: Tensor, step: Transitions) -> Tensor:
    """Return the mean of the next latent, `[B, C, T, H, W]` fp32, from the network's prediction at x and time t `[B]`.

    Rollout and replay must both call this with equal values, so that a policy's ratio to itself is exactly one.
    """
    x0 = process.x0_from(prediction, x, t)
    eps = process.eps_from(prediction, x, t)
    return expand(step.x0, x) * x0 + expand(step.eps, x) * eps


def sample(mean: Tensor, noise: Tensor, std: Tensor, *, storage: torch.dtype = torch.float32) -> Tensor:
    """Return the next latent in fp32, rounded to the dtype that will be stored.

    It is rounded before its density is taken: a bf16 copy made afterwards has a log-density off by ten clip ranges.
    """
    return (mean + expand(std, mean) * noise).to(storage).float()


def log_density(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of an isotropic Gaussian, averaged over the latent, `[B]` fp32; std `[B]` above 0."""
    z = (value - mean) / expand(std, mean)
    return -0.5 * (z * z).flatten(1).mean(1) - torch.log(std) - 0.5 * math.log(2 * math.pi)


def log_densities(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return `log_density` of each clip computed by itself, so that the rounding does not depend on the other clips."""
    rows = zip(value.split(1), mean.split(1), std.split(1), strict=True)
    return torch.cat([log_density(*row) for row in rows])
