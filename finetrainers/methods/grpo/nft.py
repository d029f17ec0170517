"""DiffusionNFT (arXiv:2509.16117): reward finetuning on the forward process, with any sampler and no densities.

Clips come from a slowly following copy of the policy. On noised clips, the policy is pulled towards what a good clip
was and pushed away from what a bad one was, around that copy. With v the prediction at x_t, r in [0, 1] how good the
clip is:

    v+ = b v + (1 - b) v_old,    v- = (1 + b) v_old - b v
    L(u) = mean((x0(u) - x0)^2) / mean|x0(u) - x0|        the divisor without gradient
    loss = c (r L(v+) + (1 - r) L(v-)) / b + kl mean((v - v_ref)^2)

where r = clip(A / (2 c) + 1/2, 0, 1) with the advantage A and its clip c.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from finetrainers.diffusion.process import Process
from finetrainers.methods.base import MethodParts, Metrics
from finetrainers.models.spec import PromptEmbeds

from .noised_clips import NoisedClipsMethod, NoisyClips, OldPolicy
from .objective import velocity_divergence
from .prompts.source import PromptSource
from .rollout.batches import Part

_SMALLEST_DIVISOR = 1e-5


def implicit_loss(
    process: Process,
    prediction: Tensor,
    old: Tensor,
    batch_x0: Tensor,
    x_t: Tensor,
    time: Tensor,
    reward_weight: Tensor,
    beta: float,
) -> Tensor:
    """Return `r L(v+) + (1 - r) L(v-)`, divided by b, `[B]`; see the module."""

    def distance(velocity: Tensor) -> Tensor:
        error = process.x0_from(velocity, x_t, time) - batch_x0
        divisor = error.detach().abs().flatten(1).mean(1).clamp_min(_SMALLEST_DIVISOR)
        return (error**2).flatten(1).mean(1) / divisor

    change = beta * (prediction - old)  # exactly 0 where they agree, so that both pulls cancel exactly
    towards, away = old + change, old - change
    return (reward_weight * distance(towards) + (1 - reward_weight) * distance(away)) / beta


class NFT(NoisedClipsMethod):
    """DiffusionNFT of any registered model."""

    old: OldPolicy

    def __init__(self, parts: MethodParts[PromptSource]) -> None:
        super().__init__(parts)
        self.old = OldPolicy(parts.network)

    def sampling_policy(self) -> AbstractContextManager[None]:
        return self.old.applied()

    def old_prediction(
        self, transformer: nn.Module, x_t: Tensor, time: Tensor, conditions: PromptEmbeds, part: Part
    ) -> Tensor:
        with self.old.applied(), torch.no_grad():
            return self.sampler.predict(transformer, x_t, time, conditions)

    def loss(self, transformer: nn.Module, batch: NoisyClips) -> tuple[Tensor, Metrics]:
        transformer.eval()
        assert batch.old is not None
        prediction = self.predict(transformer, batch)
        process, beta, clip = self.sampler.process, self.section.nft_beta, self.section.advantage_clip
        reward_weight = (batch.advantage.sum(1) / clip / 2 + 0.5).clamp(0, 1)
        per_clip = clip * implicit_loss(
            process, prediction, batch.old, batch.x0, batch.x_t, batch.time, reward_weight, beta
        )
        moved = velocity_divergence(prediction.detach(), batch.old)
        metrics = {"moved": (batch.share * moved).sum()}
        if self.reference is not None:
            divergence = self.reference_divergence(transformer, batch, prediction)
            per_clip = per_clip + self.section.nft_kl * divergence
            metrics["kl"] = (batch.share * divergence.detach()).sum()
        loss = (batch.share * per_clip).sum()
        return loss, {"loss": loss.detach(), **metrics}
