"""Timestep sampling for training: distributions of noise levels over [0, 1], shifts, and loss weights.

`u` is a noise-level quantile, 1 being pure noise. Formulae: Esser et al. 2024 (SD3), section 3.1, with their t as u:
logit-normal u = sigmoid(N(m, s)), so that a positive mean trains noisier levels; mode
u = 1 - v - k (cos^2(pi v / 2) - 1 + v) for uniform v.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from finetrainers.config.sections import DiffusionSection
from finetrainers.utils.failures import InputError


def sample_quantiles(
    generators: Sequence[torch.Generator], config: DiffusionSection, within: tuple[float, float] | None = None
) -> Tensor:
    """Return one quantile per generator, `[B]` fp32 on the generators' device.

    Args:
        generators: one for each quantile.
        config: the distribution.
        within: range that the distribution is truncated to, or None for all quantiles. Each quantile then has the same
            rank in the truncated distribution as without it in the whole one, and is fp64.
    """
    device = generators[0].device
    if config.flow_weighting_scheme == "logit_normal":
        mean, std = config.flow_logit_mean, config.flow_logit_std
        z = torch.stack([torch.randn((), generator=g, device=device, dtype=torch.float32) for g in generators])
        return torch.sigmoid(mean + std * (z if within is None else _truncate_normal(z, within, mean, std)))
    v = torch.stack([torch.rand((), generator=g, device=device, dtype=torch.float32) for g in generators])
    if within is not None:
        low, high = within
        if config.flow_weighting_scheme == "mode":
            low, high = (_invert_mode(bound, config.flow_mode_scale) for bound in (high, low))
        v = low + (high - low) * v.double()
    return _mode(v, config.flow_mode_scale) if config.flow_weighting_scheme == "mode" else v


#: Of `shifted_logit_normal`: normal quantiles (0.5% and 99.9%) whose levels become 0 and 1, the level that lower ones
#: are reflected at, and the share of uniform levels.
_LOW_QUANTILE, _HIGH_QUANTILE, _LEAST_LEVEL, _UNIFORM_SHARE = -2.5758, 3.0902, 1e-3, 0.1


def sample_stretched(generators: Sequence[torch.Generator], mean: float) -> Tensor:
    """Return one noise level per generator of `shifted_logit_normal`, `[B]` fp32 on the generators' device.

    That is sigmoid(mean + N(0, 1)), stretched so that its quantiles of 0.5% and 99.9% are 0 and 1, which longer clips
    would hardly reach, or in one of ten cases uniform.

    Args:
        generators: one for each level.
        mean: logarithm of the shift, which grows with the number of tokens.
    """
    device = generators[0].device
    draws = [
        torch.stack([draw((), generator=g, device=device, dtype=torch.float32) for g in generators])
        for draw in (torch.randn, torch.rand, torch.rand)
    ]
    normal, uniform, choice = draws
    # By distances from 1, sigmoid(-x), since at large shifts fp32 rounds the levels themselves to 1.
    low, high = (torch.sigmoid(torch.tensor(-(mean + q), device=device)) for q in (_LOW_QUANTILE, _HIGH_QUANTILE))
    level = (low - torch.sigmoid(-(mean + normal))) / (low - high)
    level = torch.where(level >= _LEAST_LEVEL, level, 2 * _LEAST_LEVEL - level).clamp(0, 1)
    return torch.where(choice > _UNIFORM_SHARE, level, _LEAST_LEVEL + (1 - _LEAST_LEVEL) * uniform)


def _mode(v: Tensor, scale: float) -> Tensor:
    return 1 - v - scale * (torch.cos(math.pi * v / 2) ** 2 - 1 + v)


def _invert_mode(u: float, scale: float) -> float:
    """Return the uniform number that `_mode`, which decreases, maps to u."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(_mode(torch.tensor(middle).double(), scale)) > u else (low, middle)
    return (low + high) / 2


def _truncate_normal(z: Tensor, within: tuple[float, float], mean: float, std: float) -> Tensor:
    """Map standard normal numbers to those of which `sigmoid(mean + std * z)` is within a range, by rank; fp64."""
    bounds = (torch.logit(torch.tensor(within, dtype=torch.float64, device=z.device)) - mean) / std
    side = -1.0 if bounds[0] > 0 else 1.0  # probabilities near 1 have few digits
    low, high = torch.special.ndtr(side * bounds)
    return side * torch.special.ndtri(low + (high - low) * torch.special.ndtr(z.double()))


def shift_noise_level(sigma: Tensor, shift: float) -> Tensor:
    """Return s x / (1 + (s - 1) x): towards noise for s > 1; keeps 0 and 1 (SD3, equation 23)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def resolution_mu(num_tokens: int, config: Mapping[str, Any]) -> float:
    """Return mu, linear in the token count, as `calculate_shift` of the diffusers pipelines; the shift is exp(mu).

    Args:
        num_tokens: video tokens of a clip.
        config: the shifts and their sequence lengths, under their names in a scheduler's config.
    """
    base_len, base_shift = config["base_image_seq_len"], config["base_shift"]
    slope = (config["max_shift"] - base_shift) / (config["max_image_seq_len"] - base_len)
    return slope * num_tokens + base_shift - slope * base_len


def loss_weight(sigma: Tensor, scheme: str, *, maximum: float) -> Tensor:
    """Return the weight of a flow-matching loss at noise level sigma, bounded by `maximum`, shaped like sigma.

    sigma_sqrt: sigma^-2; cosmap: 2 / (pi (1 - 2 sigma + 2 sigma^2)) (diffusers' names and forms); else 1.
    """
    if scheme == "sigma_sqrt":
        return sigma.clamp_min(maximum**-0.5) ** -2.0
    if scheme == "cosmap":
        return (2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))).clamp_max(maximum)
    return torch.ones_like(sigma).clamp_max(maximum)


def resolution_shift(config: DiffusionSection, scheduler_config: Mapping[str, Any]) -> dict[str, float]:
    """Return options for `resolution_mu`: the user's, else the checkpoint scheduler's, else the documented defaults.

    Raises:
        ValueError: the longer sequence is not longer.
    """
    options: dict[str, tuple[float | None, float]] = {
        "base_image_seq_len": (config.flow_base_seq_len, 256),
        "max_image_seq_len": (config.flow_max_seq_len, 4096),
        "base_shift": (config.flow_base_shift, 0.5),
        "max_shift": (config.flow_max_shift, 1.15),
    }
    shifts: dict[str, float] = {}
    for name, (option, fallback) in options.items():
        value = option if option is not None else scheduler_config.get(name)
        shifts[name] = type(fallback)(fallback if value is None else value)
    base_len, max_len = shifts["base_image_seq_len"], shifts["max_image_seq_len"]
    if base_len >= max_len:
        raise InputError(
            f"--flow_max_seq_len {max_len} must be above --flow_base_seq_len {base_len} (the default is that of the "
            "checkpoint's scheduler, else 256 and 4096)",
            "conflict",
        )
    return shifts


class NoiseLevels:
    """Sampler of the noise-level quantiles of a batch, as configured."""

    def __init__(
        self,
        config: DiffusionSection,
        *,
        is_flow: bool,
        scheduler_config: Mapping[str, Any],
        within: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """Args:
        config: the options.
        is_flow: whether quantiles are shifted.
        scheduler_config: config of the checkpoint's scheduler.
        within: range of quantiles of the network; see `Facts.noise_range`.
        """
        self.config = config
        self.within = within
        self.is_flow = is_flow
        self.resolution = resolution_shift(config, scheduler_config) if config.flow_resolution_shifting else None

    def shift(self, num_tokens: int) -> float:
        """Return the shift that applies to clips of `num_tokens` video tokens."""
        if self.resolution is None:
            return self.config.flow_shift
        return math.exp(resolution_mu(num_tokens, self.resolution))

    def sample(self, generators: Sequence[torch.Generator], num_tokens: int) -> Tensor:
        """Return quantiles `[B]` for one generator per sample, of the configured distribution within the range."""
        shift = self.shift(num_tokens) if self.is_flow else 1.0
        if self.config.flow_weighting_scheme == "shifted_logit_normal":
            return sample_stretched(generators, math.log(shift))
        if self.within == (0.0, 1.0):
            u = sample_quantiles(generators, self.config)
            return u if shift == 1.0 else shift_noise_level(u, shift)
        low, high = self.within
        # The inverse of a shift by s is the shift by 1 / s.
        unshifted = shift_noise_level(torch.tensor(self.within, dtype=torch.float64), 1 / shift).clamp(0, 1).tolist()
        u = sample_quantiles(generators, self.config, (unshifted[0], unshifted[1]))
        return shift_noise_level(u, shift).clamp(low, high).float()  # it rounds

    def map_to_range(self, u: Tensor) -> Tensor:
        """Map equally spaced quantiles of all noise to equally spaced ones of the network's range."""
        low, high = self.within
        return u if (low, high) == (0.0, 1.0) else low + (high - low) * u

    def weight(self, t: Tensor) -> Tensor | None:
        """Return the loss weight per sample at process time t, shaped like it, or None if all are 1."""
        is_weighted = self.config.flow_weighting_scheme in ("sigma_sqrt", "cosmap") or self.config.loss_weight_max < 1
        if not self.is_flow or not is_weighted:
            return None
        return loss_weight(t, self.config.flow_weighting_scheme, maximum=self.config.loss_weight_max)
