"""The loss of one transition: the clipped ratio of the new policy to the old one, and how far it may stray.

Everything is per clip, `[B]`; averaging over clips, transitions and ranks is the caller's. Log-densities are means over
the latent's elements (see `diffusion.policy.log_density`), so a ratio here is the geometric mean of elementwise ratios.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from finetrainers.diffusion.process import expand

#: Clip range times the square root of the number of latent elements. The log-ratio of a mean log-density has a spread
#: of 1 / sqrt(D), so a fixed range has another meaning at every resolution; published ranges lie between 0.003 and 0.5.
CLIP_SCALE = 0.1

#: Number of equal intervals of the noise level s / (a + s) for gradient metrics.
NOISE_BINS = 4


@dataclass(frozen=True)
class Clipped:
    """Loss and diagnostics of the clipped objective, `[B]` each; the diagnostics carry no gradient."""

    loss: Tensor
    ratio: Tensor
    clipped_high: Tensor
    clipped_low: Tensor


def clip_range(option: float | None, elements: int) -> float:
    """Return the configured range, or `CLIP_SCALE / sqrt(elements)` if it is None."""
    return CLIP_SCALE / math.sqrt(elements) if option is None else option


def clipped_ratio(log_new: Tensor, log_old: Tensor, advantage: Tensor, epsilon: float) -> Clipped:
    """Return PPO's objective (Schulman et al. 2017, eq. 7): max(-A r, -A clip(r, 1 - e, 1 + e)), r = exp(new - old).

    Args:
        log_new, log_old: log-densities, `[B]`.
        advantage: `[B, K]`; the objectives of the K terms are summed. A clip counts as clipped if one of them is.
        epsilon: e.
    """
    ratio = torch.exp(log_new - log_old)
    held = ratio.clamp(1 - epsilon, 1 + epsilon)
    loss = torch.maximum(-advantage * ratio[:, None], -advantage * held[:, None]).sum(1)
    seen = ratio.detach()
    return Clipped(
        loss=loss,
        ratio=seen,
        clipped_high=((advantage > 0).any(1) & (seen > 1 + epsilon)).float(),
        clipped_low=((advantage < 0).any(1) & (seen < 1 - epsilon)).float(),
    )


def without_drift(log_new: Tensor, log_old: Tensor, mean: Tensor, mean_old: Tensor, std: Tensor) -> Tensor:
    """Return the new log-density, corrected so that its difference to the old one is centered and of uniform scale.

    GRPO-Guard: a mean that moved by d changes the log-density by a noise term of size d / std and by -d^2 / (2 std^2),
    which pulls all ratios below one. With that bias added back, and scaled by std, which is sqrt(-dt) sigma_t, so that
    all steps have one scale, the ratio is exp((dlogp + bias) std).

    GRPO-Guard's code also divides a step's loss by its length -dt, which evens out the gradients of steps of different
    lengths. That is left out here: with short steps it enlarges the loss many times, and weights of steps are a
    separate option (`windows.step_weights`).
    """
    bias = ((mean - mean_old) ** 2).flatten(1).mean(1) / (2 * std**2)
    return log_old + (log_new - log_old + bias) * std


def velocity_divergence(prediction: Tensor, reference: Tensor) -> Tensor:
    """Return the mean squared distance of two predictions, `[B]`: a KL divergence up to a noise-level factor.

    The factor depends on the noise level; without it, low noise levels do not dominate.
    """
    return ((prediction - reference) ** 2).flatten(1).mean(1)


def mean_divergence(mean: Tensor, reference: Tensor, std: Tensor) -> Tensor:
    """Return KL divergences `[B]` of transitions of equal std, as means over elements: (mu - mu_ref)^2 / (2 std^2)."""
    return (((mean - reference) / expand(std, mean)) ** 2).flatten(1).mean(1) / 2


def gradient_by_noise(loss: Tensor, prediction: Tensor, noise: Tensor) -> dict[str, Tensor]:
    """Return the sum of clips' gradient norms in every interval of noise levels, to show where the gradient comes from.

    The gradient is that by the network's prediction, `[B, C, T, H, W]`, which takes no pass through the network. Named
    `gradient/LOW-HIGH`; intervals without a clip are 0, so that all ranks and micro-batches give equal names.

    Args:
        loss: scalar, made from the prediction.
        prediction: the network's prediction with its graph, which is retained.
        noise: noise level of each clip, `[B]` in [0, 1].
    """
    (slope,) = torch.autograd.grad(loss, prediction, retain_graph=True)
    return by_noise(slope.flatten(1).norm(dim=1), noise)


def by_noise(norms: Tensor, noise: Tensor) -> dict[str, Tensor]:
    """Return sums of norms `[B]` in every interval of noise levels `[B]`; see `gradient_by_noise`."""
    place = (noise * NOISE_BINS).long().clamp(0, NOISE_BINS - 1)
    width = 1 / NOISE_BINS
    return {f"gradient/{i * width:.2f}-{(i + 1) * width:.2f}": (norms * (place == i)).sum() for i in range(NOISE_BINS)}
