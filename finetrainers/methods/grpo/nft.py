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

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.diffusion.process import Process
from finetrainers.methods.base import MethodParts, Metrics
from finetrainers.models.spec import PromptEmbeds
from finetrainers.utils.device import to_device
from finetrainers.utils.failures import InputError
from finetrainers.utils.seeding import derive_seed

from .objective import velocity_divergence
from .prompts.source import PromptSource
from .rollout.batches import Part
from .rollout.collect import RolloutBatch
from .rollout_method import RolloutMethod

_SMALLEST_DIVISOR = 1e-5


@dataclass(frozen=True)
class NoisyClips:
    """Clips of a micro-batch, each at one noise level.

    Attributes:
        x0, x_t: clean latents and noised ones, `[B, C, T, H, W]` fp32.
        time: process time, `[B]`.
        reward_weight: r, `[B]`.
        share: share of each clip in the step's loss, `[B]`; 0 for clips that only fill up.
        old: prediction of the policy that made the clips, like `x0`.
        conditions: text conditioning, as `Sampler.predict` takes it.
    """

    x0: Tensor
    x_t: Tensor
    time: Tensor
    reward_weight: Tensor
    share: Tensor
    old: Tensor
    conditions: PromptEmbeds


def decay(step: int, schedule: Sequence[float]) -> float:
    """Return d after an optimizer step, of `old = d old + (1 - d) new`; 0 makes the old policy the new one.

    d = min((step - flat) rate, maximum), with `schedule` = (flat, rate, maximum).
    """
    flat, rate, maximum = schedule
    return min(max(step - flat, 0.0) * rate, maximum)


class OldPolicy:
    """A copy of the trained weights that follows them."""

    def __init__(self, network: nn.Module) -> None:
        self._trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.weights = {name: p.detach().clone() for name, p in self._trained.items()}

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Move towards the trained weights."""
        for name, parameter in self._trained.items():
            self.weights[name].lerp_(parameter.detach(), 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the network the old policy within the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._trained.items():
            parameter.data, self.weights[name] = self.weights[name], parameter.data


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


class NFT(RolloutMethod[RolloutBatch, NoisyClips]):
    """DiffusionNFT of any registered model."""

    def __init__(self, parts: MethodParts[PromptSource]) -> None:
        super().__init__(parts, uses_reference=parts.config.grpo.nft_kl > 0)
        self.repeats = self.section.nft_timesteps
        self.old = OldPolicy(parts.network)

    def collect(self, transformer: nn.Module, rollout: int) -> RolloutBatch:
        if rollout:
            self.old.follow(decay(rollout * self.updates, self.section.nft_decay))
        with self.old.applied():
            return super().collect(transformer, rollout)

    def rollout(self, transformer: nn.Module, rollout: int) -> RolloutBatch:
        return self.collector.collect(transformer, rollout)

    def dummy_rollout(self) -> RolloutBatch:
        return self.collector.dummy_rollout()

    def micro_batch(self, transformer: nn.Module, collected: RolloutBatch, rollout: int, part: Part) -> NoisyClips:
        """Return a micro-batch; each clip has separate noise at a separate noise level."""
        device, level = self.sampler.device, part.repeat
        jobs = [collected.jobs[i] for i in part.clips]
        # Without replacement, as in the published code: a clip is trained at `levels` different noise levels.
        steps = torch.tensor([self._order(rollout, job.slot, job.generation)[level] for job in jobs])
        x0 = to_device(torch.stack([collected.latents[i] for i in part.clips]), device).float()
        time = self.sampler.time(steps)
        x_t = self.sampler.process.add_noise(x0, self.sampler.noise(jobs, f"noised {level}"), time)
        conditions = self.collector.source.conditions([job.prompt for job in jobs])
        transformer.eval()
        with self.old.applied(), torch.no_grad():
            old = self.sampler.predict(transformer, x_t, time, conditions)
        advantages = to_device(collected.advantages[part.clips].sum(1), device)
        return NoisyClips(
            x0=x0,
            x_t=x_t,
            time=time,
            reward_weight=(advantages / self.section.advantage_clip / 2 + 0.5).clamp(0, 1),
            share=to_device(torch.tensor(part.shares), device),
            old=old,
            conditions=conditions,
        )

    def _order(self, *key: int) -> list[int]:
        """Return the sampler's steps in a clip-specific order, repeated if they are fewer than the trained levels."""
        order = list(self.sampler.tables.own)
        random.Random(derive_seed(self.seed, "levels", *key)).shuffle(order)
        return order * -(-self.repeats // len(order))

    def _predict(self, transformer: nn.Module, batch: NoisyClips) -> Tensor:
        return self.sampler.predict(transformer, batch.x_t, batch.time, batch.conditions)

    def loss(self, transformer: nn.Module, batch: NoisyClips) -> tuple[Tensor, Metrics]:
        transformer.eval()
        prediction = self._predict(transformer, batch)
        process, beta = self.sampler.process, self.section.nft_beta
        per_clip = self.section.advantage_clip * implicit_loss(
            process, prediction, batch.old, batch.x0, batch.x_t, batch.time, batch.reward_weight, beta
        )
        moved = velocity_divergence(prediction.detach(), batch.old)
        metrics = {"moved": (batch.share * moved).sum()}
        if self.reference is not None:
            with torch.no_grad(), self.reference(transformer) as network:
                reference = self._predict(network, batch)
            divergence = velocity_divergence(prediction, reference)
            per_clip = per_clip + self.section.nft_kl * divergence
            metrics["kl"] = (batch.share * divergence.detach()).sum()
        loss = (batch.share * per_clip).sum()
        return loss, {"loss": loss.detach(), **metrics}

    def state_dict(self) -> dict[str, Any]:
        return {"old": dict(self.old.weights), **super().state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != "old"})
        saved = state.get("old", {})
        if saved.keys() != self.old.weights.keys():
            message = "the checkpoint's sampling policy has other weights; was it saved by another --method?"
            raise InputError(message, "mismatch")
        for name, weight in self.old.weights.items():
            weight.copy_(saved[name])
