"""The common part of methods that train noised clips: rollouts without noise in the steps, and an older policy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.config.hacking import measures_kl
from finetrainers.config.values import range_between
from finetrainers.methods.base import MethodParts
from finetrainers.models.spec import PromptEmbeds
from finetrainers.utils.device import to_device
from finetrainers.utils.failures import InputError
from finetrainers.utils.seeding import derive_seed

from .objective import velocity_divergence
from .prompts.prompts import RolloutSample
from .prompts.source import PromptSource
from .rollout.batches import Part
from .rollout.collect import RolloutBatch
from .rollout_method import RolloutMethod


@dataclass(frozen=True)
class NoisyClips:
    """Clips of a micro-batch, each at one noise level.

    Attributes:
        x0, noise, x_t: clean latents, the noise that is added, and noised latents, `[B, C, T, H, W]` fp32.
        time: process time, `[B]`.
        advantage: `[B, K]`; see `Advantages.terms`.
        share: share of each clip in the step's loss, `[B]`; 0 for clips that only fill up.
        conditions: text conditioning, as `Sampler.predict` takes it.
        old: prediction of the policy that made the clips, like `x0`, or None if it is that of the trained network.
    """

    x0: Tensor
    noise: Tensor
    x_t: Tensor
    time: Tensor
    advantage: Tensor
    share: Tensor
    conditions: PromptEmbeds
    old: Tensor | None


def decay(step: int, schedule: Sequence[float]) -> float:
    """Return d after an optimizer step, of `old = d old + (1 - d) new`; 0 makes the old policy the new one.

    d = min((step - flat) rate, maximum), with `schedule` = (flat, rate, maximum).
    """
    flat, rate, maximum = schedule
    return min(max(step - flat, 0.0) * rate, maximum)


class OldPolicy:
    """A copy of the trained weights that follows them.

    Attributes:
        is_whole: False while weights are being moved or swapped, and for good if an interrupt has ended that.
    """

    is_whole = True

    def __init__(self, network: nn.Module) -> None:
        self._trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.weights = {name: p.detach().clone() for name, p in self._trained.items()}

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Move towards the trained weights."""
        self.is_whole = False
        for name, parameter in self._trained.items():
            self.weights[name].lerp_(parameter.detach(), 1.0 - decay)
        self.is_whole = True

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the network the old policy within the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self.is_whole = False
        for name, parameter in self._trained.items():
            parameter.data, self.weights[name] = self.weights[name], parameter.data
        self.is_whole = True

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the weights of a checkpoint.

        Raises:
            InputError: they are those of another network.
        """
        if saved.keys() != self.weights.keys():
            message = "the checkpoint's sampling policy has other weights; was it saved by another --method?"
            raise InputError(message, "mismatch")
        for name, weight in self.weights.items():
            weight.copy_(saved[name])


class NoisedClipsMethod(RolloutMethod[RolloutBatch, NoisyClips]):
    """A method that trains clips of a rollout with new noise; a subclass defines `loss`.

    Attributes:
        old: policy that follows the trained one, stored in checkpoints; None if the method has none.
        trained_levels: the sampler's steps at whose noise levels clips are trained.
    """

    old: OldPolicy | None = None
    _moved_for: int | None = None  # the rollout that `old` has moved for, which it must not do twice

    def __init__(self, parts: MethodParts[PromptSource]) -> None:
        super().__init__(parts, uses_reference=measures_kl(parts.config))
        self.repeats = self.section.noise_levels
        steps = self.section.sampling_steps
        allowed = range_between(self.section.noise_level_range, steps, steps)
        self.trained_levels = [step for step in self.sampler.tables.own if step in allowed]

    def collect(self, transformer: nn.Module, rollout: int) -> RolloutBatch:
        if rollout and self.old is not None and self._moved_for != rollout:
            self.old.follow(decay(rollout * self.updates, self.section.old_policy_decay))
            self._moved_for = rollout
        with self.sampling_policy():
            return super().collect(transformer, rollout)

    def sampling_policy(self) -> AbstractContextManager[None]:
        """Return a context in which the network is the policy that samples, by default the trained one."""
        return nullcontext()

    def rollout(self, transformer: nn.Module, rollout: int) -> RolloutBatch:
        return self.collector.collect(transformer, rollout)

    def dummy_rollout(self) -> RolloutBatch:
        return self.collector.dummy_rollout()

    def micro_batch(self, transformer: nn.Module, collected: RolloutBatch, rollout: int, part: Part) -> NoisyClips:
        """Return a micro-batch; each clip has separate noise at a separate noise level."""
        device, level = self.sampler.device, part.repeat
        jobs = [collected.jobs[i] for i in part.clips]
        steps = torch.tensor([self.levels(rollout, job)[level] for job in jobs])
        x0 = to_device(torch.stack([collected.latents[i] for i in part.clips]), device).float()
        time = self.sampler.time(steps)
        noise = self.sampler.noise(jobs, f"noised {level}")
        x_t = self.sampler.process.add_noise(x0, noise, time)
        conditions = self.collector.source.conditions([job.prompt for job in jobs])
        transformer.eval()
        return NoisyClips(
            x0=x0,
            noise=noise,
            x_t=x_t,
            time=time,
            advantage=to_device(collected.advantages[part.clips], device),
            share=to_device(torch.tensor(part.shares), device),
            conditions=conditions,
            old=self.old_prediction(transformer, x_t, time, conditions, part),
        )

    def levels(self, rollout: int, job: RolloutSample) -> list[int]:
        """Return the sampler's steps at whose noise levels a clip is trained, all different as far as possible."""
        order = list(self.trained_levels)
        random.Random(derive_seed(self.seed, "levels", rollout, job.slot, job.generation)).shuffle(order)
        return order * -(-self.repeats // len(order))

    def old_prediction(
        self, transformer: nn.Module, x_t: Tensor, time: Tensor, conditions: PromptEmbeds, part: Part
    ) -> Tensor | None:
        """Return the prediction of the policy that made the clips, or None if the loss does not need it."""
        return None

    def predict(self, transformer: nn.Module, batch: NoisyClips) -> Tensor:
        """Return the network's prediction for the noised clips, like `x0`."""
        return self.sampler.predict(transformer, batch.x_t, batch.time, batch.conditions)

    def reference_divergence(self, transformer: nn.Module, batch: NoisyClips, prediction: Tensor) -> Tensor:
        """Return the mean squared distance of a prediction from the reference model's, `[B]`."""
        assert self.reference is not None
        with torch.no_grad(), self.reference(transformer) as network:
            reference = self.predict(network, batch)
        return velocity_divergence(prediction, reference)

    @property
    def fits_last_step(self) -> bool:
        return self.old is None or self.old.is_whole

    def state_dict(self) -> dict[str, Any]:
        old: dict[str, Any] = {} if self.old is None else {"old": dict(self.old.weights)}
        if old and self._moved_for is not None:
            old["moved_for"] = self._moved_for
        return {**old, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.old is None:
            super().load_state_dict(state)
            return
        super().load_state_dict({name: value for name, value in state.items() if name not in ("old", "moved_for")})
        self._moved_for = state.get("moved_for")
        self.old.load(state.get("old", {}))
