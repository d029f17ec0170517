"""Reward finetuning by policy gradients: clips that scored above the others of their prompt become more likely.

A rollout serves one or more optimizer steps. Its transitions are replayed through the network, and each clip's
advantage weighs the ratio of the new policy's density to that of the policy that sampled it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.diffusion.policy import Transitions, log_densities, log_density, transition_mean
from finetrainers.methods.base import MethodParts, Metrics, Step
from finetrainers.models.spec import PromptEmbeds
from finetrainers.utils.device import to_device

from .objective import (
    clip_range,
    clipped_ratio,
    gradient_by_noise,
    mean_divergence,
    velocity_divergence,
    without_drift,
)
from .prompts.source import PromptSource
from .rollout.batches import Part, SharedInputs
from .rollout.collect import RolloutBatch
from .rollout_method import RolloutMethod

logger = logging.getLogger(__name__)

#: Remedy on a GPU, where cuDNN's attention has separate kernels with and without gradients.
_OTHER_KERNEL = ", or, where cuDNN computes attention (H100, H200), --attn_backend _native_flash"


@dataclass(frozen=True)
class Transition:
    """One trained transition of each of some clips, ready for the loss.

    Attributes:
        before: latents before it, `[R, C, T, H, W]` fp32: R are the B clips, or the inputs that they share.
        after: latents after it, `[B, C, T, H, W]` fp32.
        time: process time before it, `[R]`.
        step: the transition's coefficients, `[B]`.
        length: decrease of the noise level, `[B]`.
        log_old, mean_old: log-density and mean under the policy that sampled it; see `Replay`.
        advantage: `[B, K]`; see `Advantages.terms`.
        weight: share of each clip in the step's loss, times its step's weight, `[B]`; 0 for clips that only fill up.
        share: share of each clip in the step's loss, `[B]`, for averages of metrics.
        conditions: text conditioning of the R inputs, as `Sampler.predict` takes it.
        sharing: numbers of consecutive clips that share an input, or None if each has its own.
        is_first: whether it is the first micro-batch of its update.
        is_fresh: whether the policy is still the one that sampled.
    """

    before: Tensor
    after: Tensor
    time: Tensor
    step: Transitions
    length: Tensor
    log_old: Tensor
    mean_old: Tensor | None
    advantage: Tensor
    weight: Tensor
    share: Tensor
    conditions: PromptEmbeds
    sharing: list[int] | None
    is_first: bool
    is_fresh: bool

    def by_clip(self, inputs: Tensor) -> Tensor:
        """Return `[B, ...]`, for each clip the row of its input in `[R, ...]`; gradients of an input's clips add up."""
        if self.sharing is None:
            return inputs
        rows = zip(inputs.split(1), self.sharing, strict=True)
        return torch.cat([row.expand(count, *row.shape[1:]) for row, count in rows])


class GRPO(RolloutMethod[RolloutBatch, Transition]):
    """Group relative policy optimization of any registered model."""

    def __init__(self, parts: MethodParts[PromptSource]) -> None:
        super().__init__(parts, uses_reference=parts.config.grpo.kl_coef > 0)
        self.repeats = self.sampler.tables.num_trained
        self.epsilon = clip_range(self.section.clip_range, math.prod(self.sampler.shape))
        self._ratio_error = torch.zeros(())  # the largest error of the current step

    # ---- batches -----------------------------------------------------------------------------------------------

    def rollout(self, transformer: nn.Module, rollout: int) -> RolloutBatch:
        return self.collector.collect(transformer, rollout)

    def dummy_rollout(self) -> RolloutBatch:
        return self.collector.dummy_rollout()

    def micro_batch(self, transformer: nn.Module, collected: RolloutBatch, rollout: int, part: Part) -> Transition:
        """Return one trained transition of each clip of a part."""
        device, tables, k = self.sampler.device, self.sampler.tables, part.repeat
        steps = torch.stack([collected.replays[i].steps[k] for i in part.clips])
        share = to_device(torch.tensor(part.shares), device)
        ends = list(accumulate(part.sharing or [1] * len(part.clips)))
        inputs = [0, *ends[:-1]]  # the first clip of each input

        def stacked(name: str, clips: Sequence[int] = part.clips) -> Tensor:
            replays = [collected.replays[i] for i in clips]
            return to_device(torch.stack([getattr(replay, name)[k] for replay in replays]), device).float()

        return Transition(
            before=stacked("before", [part.clips[i] for i in inputs]),
            after=stacked("after"),
            time=self.sampler.time(steps[inputs]),
            step=tables.stochastic.at_steps(steps, device),
            length=to_device(tables.lengths[steps.cpu()].float(), device),
            log_old=stacked("log_old"),
            mean_old=stacked("mean_old") if self.sampler.keeps_means else None,
            advantage=to_device(collected.advantages[part.clips], device),
            weight=share * to_device(tables.weights[steps.cpu()].float(), device),
            share=share,
            conditions=self.collector.source.conditions([collected.jobs[part.clips[i]].prompt for i in inputs]),
            sharing=part.sharing,
            is_first=part.is_first,
            is_fresh=part.update == 0,
        )

    def shared_inputs(self, collected: RolloutBatch) -> SharedInputs | None:
        return collected.shared

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"shares_starts": True} if self.collector.shares_starts else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A run of an earlier version goes on as it began: sharing rounds differently.
        self.collector.shares_starts = self.collector.shares_starts and state.get("shares_starts", False)
        super().load_state_dict({name: value for name, value in state.items() if name != "shares_starts"})

    def dry_steps(self, transformer: nn.Module) -> Iterator[tuple[str, Step[Transition]]]:
        collected = self.dummy_rollout()
        # By the inputs of a call, then by the clips that share them; of each kind, the largest.
        parts = sorted(self.parts(collected, 0)[0], key=lambda part: (len(part), len(part.clips)))
        for part in reversed({part.sharing is None: part for part in parts}.values()):
            name = "a rollout's micro-batch" if part.sharing is None else "a rollout's shared inputs"
            part = replace(part, update=1, is_first=True)
            yield name, Step([part], partial(self.micro_batch, transformer, collected, 0))

    # ---- loss --------------------------------------------------------------------------------------------------

    def loss(self, transformer: nn.Module, batch: Transition) -> tuple[Tensor, Metrics]:
        # Samples between the updates of a rollout may have changed the mode, of the network below its wrapper too.
        transformer.eval()
        prediction, mean = self._mean(transformer, batch)
        # As in the rollout, where shared transitions are compared clip by clip.
        density = log_density if batch.sharing is None else log_densities
        log_new = density(batch.after, mean, batch.step.std)
        if self.section.ratio_norm:
            assert batch.mean_old is not None
            log_new = without_drift(log_new, batch.log_old, mean, batch.mean_old, batch.step.std)
        objective = clipped_ratio(log_new, batch.log_old, batch.advantage, self.epsilon)
        loss = (batch.weight * objective.loss).sum()
        change = (log_new - batch.log_old).detach()
        values = {
            "ratio": objective.ratio,
            "clipped_high": objective.clipped_high,
            "clipped_low": objective.clipped_low,
            "approx_kl": 0.5 * change**2,
        }
        if self.reference is not None:
            divergence = self._divergence(self.reference(transformer), batch, prediction, mean)
            loss = loss + self.section.kl_coef * (batch.share * divergence).sum()
            values["kl"] = divergence.detach()
        metrics = {name: (batch.share * value).sum() for name, value in values.items()}
        metrics["ratio_error"] = self._increase_ratio_error(batch, objective.ratio)
        alpha, sigma = self.sampler.process.alpha_sigma(batch.by_clip(batch.time))
        metrics |= gradient_by_noise(loss, prediction, sigma / (alpha + sigma))
        return loss, {"loss": loss.detach(), **metrics}

    def _mean(self, transformer: nn.Module, batch: Transition) -> tuple[Tensor, Tensor]:
        """Return the network's prediction for each clip, and the mean of the transition that it makes."""
        prediction = batch.by_clip(self.sampler.predict(transformer, batch.before, batch.time, batch.conditions))
        before, time = batch.by_clip(batch.before), batch.by_clip(batch.time)
        return prediction, transition_mean(self.sampler.process, prediction, before, time, batch.step)

    def _divergence(
        self, reference: AbstractContextManager[nn.Module], batch: Transition, prediction: Tensor, mean: Tensor
    ) -> Tensor:
        """Return the distance of the policy from the reference at this transition, `[B]`."""
        with torch.no_grad(), reference as network:
            prediction_ref, mean_ref = self._mean(network, batch)
        if self.section.kl_space == "velocity":
            return velocity_divergence(prediction, prediction_ref)
        divergence = mean_divergence(mean, mean_ref, batch.step.std)
        # A step's variance is the squared noise rate times its length, which Flow-GRPO leaves out.
        return divergence * batch.length if self.section.kl_space == "rate" else divergence

    def _increase_ratio_error(self, batch: Transition, ratio: Tensor) -> Tensor:
        """Return how much this micro-batch raises the step's largest error of a ratio that must be 1.

        The sum over micro-batches is the largest error. It is 0 once the policy has been updated since it sampled.
        """
        if batch.is_first:
            self._ratio_error = ratio.new_zeros(())
        if not batch.is_fresh:
            return ratio.new_zeros(())
        before = self._ratio_error
        self._ratio_error = torch.maximum(before, ((ratio - 1).abs() * (batch.share > 0)).max())
        return self._ratio_error - before

    def look(self) -> None:
        """Warn of ratios that must be 1 and are not."""
        error = float(self._ratio_error)
        if error > self.epsilon / 2:
            kernel = "" if self.sampler.device.type == "cpu" else _OTHER_KERNEL
            logger.warning(
                "the trained policy differs from the sampling policy: a ratio that must be 1 is off by %.2g, and the "
                "clip range is %.2g. In fp32 it is exactly 1; lower precision may require a larger --clip_range%s",
                error, self.epsilon, kernel,
            )  # fmt: skip
