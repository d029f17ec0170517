"""Advantage Weighted Matching (AWM, arXiv:2509.25050): policy gradients on the forward process.

The loss of pretraining is the negative log-likelihood of a clip up to a constant, so that on noised clips it takes the
place of log-densities of denoising steps. With v the prediction at x_t, u its target, s the noise level, A the
advantage and c its clip, e the clip range, and r the ratio to the policy that made the clips:

    log p = -h(mean((v - u)^2), s)                        h: `--matching_loss`
    r = exp(log p - log p_rollout)
    loss = max(-A/c r, -A/c clip(r, 1 - e, 1 + e)) + kl mean((v - v_ref)^2) + old_kl mean((v - v_old)^2)

averaged over clips and noise levels. v_old is the prediction of a copy of the policy that follows it. Before the first
update of a rollout r is exactly 1, and the gradient of the first term that of A/c h.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.config.grpo import MatchingLoss
from finetrainers.methods.base import MethodParts, Metrics
from finetrainers.models.spec import PromptEmbeds
from finetrainers.utils.seeding import derive_seed

from .noised_clips import NoisedClipsMethod, NoisyClips, OldPolicy
from .objective import clipped_ratio, gradient_by_noise, velocity_divergence
from .prompts.prompts import RolloutSample
from .prompts.source import PromptSource
from .rollout.batches import Part
from .rollout.collect import RolloutBatch

#: Clip range where none is set, as published.
_CLIP_RANGE = 1.0
#: Added to errors whose root is taken, as published.
_SMALLEST_ERROR = 1e-10


def matching_loss(error: Tensor, level: Tensor, kind: MatchingLoss, power: float) -> Tensor:
    """Return h of mean squared errors `[B]` at noise levels `[B]` in [0, 1]; see the module.

    With the error m and the noise level s: `uniform` m, `t` s m, `t2` s^2 m, `ghuber` s ((m + d)^p - d^p) / p.
    """
    if kind == "uniform":
        return error
    if kind == "t2":
        return error * level**2
    if kind == "ghuber":
        error = ((error + _SMALLEST_ERROR) ** power - _SMALLEST_ERROR**power) / power
    return error * level


class AWM(NoisedClipsMethod):
    """Advantage Weighted Matching of any registered model.

    Attributes:
        rollout_policy: policy that made the clips, for updates after the first one; None if a rollout serves one.
    """

    def __init__(self, parts: MethodParts[PromptSource]) -> None:
        super().__init__(parts)
        self.old = OldPolicy(parts.network) if self.section.old_policy_kl > 0 else None
        self.rollout_policy = OldPolicy(parts.network) if self.updates > 1 else None
        self.epsilon = _CLIP_RANGE if self.section.clip_range is None else self.section.clip_range

    def collect(self, transformer: nn.Module, rollout: int) -> RolloutBatch:
        if self.rollout_policy is not None:
            self.rollout_policy.follow(0.0)
        return super().collect(transformer, rollout)

    def levels(self, rollout: int, job: RolloutSample) -> list[int]:
        """Return a step of the sampler from each of equally long parts of the trained range."""
        draw = random.Random(derive_seed(self.seed, "levels", rollout, job.slot, job.generation))
        steps = self.trained_levels
        bounds = [len(steps) * part // self.repeats for part in range(self.repeats + 1)]
        return [steps[low + math.floor(draw.random() * (high - low))] for low, high in pairwise(bounds)]

    def old_prediction(
        self, transformer: nn.Module, x_t: Tensor, time: Tensor, conditions: PromptEmbeds, part: Part
    ) -> Tensor | None:
        if self.rollout_policy is None or part.update == 0:
            return None
        with self.rollout_policy.applied(), torch.no_grad():
            return self.sampler.predict(transformer, x_t, time, conditions)

    def log_likelihood(self, prediction: Tensor, batch: NoisyClips) -> Tensor:
        """Return log p of each clip, `[B]`, up to a constant."""
        target = self.sampler.process.target(batch.x0, batch.noise, batch.time)
        error = (prediction - target).square().flatten(1).mean(1)
        return -matching_loss(error, self._level(batch), self.section.matching_loss, self.section.matching_power)

    def _level(self, batch: NoisyClips) -> Tensor:
        alpha, sigma = self.sampler.process.alpha_sigma(batch.time)
        return sigma / (alpha + sigma)

    def loss(self, transformer: nn.Module, batch: NoisyClips) -> tuple[Tensor, Metrics]:
        transformer.eval()
        prediction = self.predict(transformer, batch)
        log_new = self.log_likelihood(prediction, batch)
        log_old = log_new.detach() if batch.old is None else self.log_likelihood(batch.old, batch)
        clip = self.section.advantage_clip
        objective = clipped_ratio(log_new, log_old, batch.advantage.clamp(-clip, clip) / clip, self.epsilon)
        per_clip = objective.loss
        values = {
            "ratio": objective.ratio,
            "clipped_high": objective.clipped_high,
            "clipped_low": objective.clipped_low,
            "approx_kl": 0.5 * (log_new - log_old).detach() ** 2,
        }
        if self.reference is not None:
            divergence = self.reference_divergence(transformer, batch, prediction)
            per_clip = per_clip + self.section.kl_coef * divergence
            values["kl"] = divergence.detach()
        if self.old is not None:
            with torch.no_grad(), self.old.applied():
                old = self.predict(transformer, batch)
            moved = velocity_divergence(prediction, old)
            per_clip = per_clip + self.section.old_policy_kl * moved
            values["moved"] = moved.detach()
        loss = (batch.share * per_clip).sum()
        metrics: dict[str, Any] = {name: (batch.share * value).sum() for name, value in values.items()}
        metrics |= gradient_by_noise(loss, prediction, self._level(batch))
        return loss, {"loss": loss.detach(), **metrics}
