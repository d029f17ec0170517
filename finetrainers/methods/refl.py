"""Reward gradients: a differentiable reward is backpropagated through the last denoising steps, DRaFT and ReFL.

With x_S the clean latents of a sampled clip, r its reward and F_s the deterministic step from x_s to x_{s+1}:

    draft      r(x_S), through the last K steps                       DRaFT-K (Clark et al. 2023, arXiv:2309.17400)
    draft-lv   r(F(a x_S + s e)) with noise e, through the last step   DRaFT-LV (the same), several e for each clip
    refl       r(x0 predicted at x_s), s drawn near the end            ReFL (Xu et al. 2023, arXiv:2304.05977)

Latents before the first of these steps are constants. Backpropagation is by the adjoint method, a step at a time:

    a_S = dr/dx_S          by one backward pass through the VAE and the reward, with no activations of the network
    dr/dw += a_{s+1} dF_s/dw,   a_s = a_{s+1} dF_s/dx_s,   s = S - 1, ..., S - K

Each step is a separate micro-batch with the loss -<a_{s+1}, F_s(x_s)>, whose backward pass gives the next adjoint. So
the memory is that of one step for any K, and whatever works with other losses (FSDP2, ZeRO, swapped blocks) works with
this one. The price is a forward pass more for each of the K steps.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.diffusion.policy import Transitions, transition_mean
from finetrainers.methods.base import MethodParts, Metrics
from finetrainers.models.spec import PromptEmbeds
from finetrainers.rewards.pixels import to_uint8
from finetrainers.rewards.reward_set import RewardError, Scores
from finetrainers.utils.device import to_device
from finetrainers.utils.failures import InputError
from finetrainers.utils.phases import REWARD, phase
from finetrainers.utils.seeding import derive_seed

from .grpo.objective import velocity_divergence
from .grpo.prompts.prompts import RolloutSample
from .grpo.prompts.source import PromptSource
from .grpo.rollout.batches import Part
from .grpo.rollout.collect import score_stats, timed
from .grpo.rollout_method import RolloutMethod


@dataclass(frozen=True, kw_only=True)
class Backpropagated:
    """A `Rollout` whose clips are all trained on, with the data for backpropagating their reward.

    Attributes:
        steps: steps of the sampler that the reward is backpropagated through, in the order of training: the last one
            first.
        before: latents before each of these steps `[C, T, H, W]`, by clip.
        adjoints: gradient of a clip's reward by the output of such a step, by clip and position among the steps. Those
            of earlier steps are added when the later ones are trained.
        scores: the weighted rewards, by clip and position; only where an adjoint comes from a reward.
    """

    jobs: Sequence[RolloutSample]
    num_ranks: int
    stats: Mapping[str, float]
    steps: Sequence[int]
    before: Mapping[int, Sequence[Tensor]]
    adjoints: dict[tuple[int, int], Tensor]
    scores: Mapping[tuple[int, int], float]

    @property
    def trained_clips(self) -> Sequence[int]:
        return range(len(self.jobs))

    @property
    def spare(self) -> Sequence[int]:
        return self.trained_clips

    @property
    def trained_by_rank(self) -> Sequence[int]:
        return [len(self.jobs)] * self.num_ranks


@dataclass(frozen=True)
class Denoised:
    """One denoising step of some clips, ready for the loss.

    Attributes:
        before: latents before it, `[B, C, T, H, W]` fp32; a leaf with a gradient where an earlier step follows.
        time: process time before it, `[B]`.
        now: its coefficients, `[B]`, or None if it predicts the clean latents.
        adjoint: gradient of the reward by its output, shaped like `before`.
        score: reward of each clip, `[B]`, at the first step that is trained of it.
        weight: share of each clip's reward in the step's loss, `[B]`; 0 for clips that only fill up.
        share: `weight` averaged over the trained steps.
        scale: 0, a leaf whose gradient is the factor that a backward pass applies to the loss, or None where it is not
            needed.
        conditions: text conditioning, as `Sampler.predict` takes it.
    """

    before: Tensor
    time: Tensor
    now: Transitions | None
    adjoint: Tensor
    score: Tensor
    weight: Tensor
    share: Tensor
    scale: Tensor | None
    conditions: PromptEmbeds


class RewardGradients(RolloutMethod[Backpropagated, Denoised]):
    """DRaFT and ReFL of any registered model."""

    def __init__(self, parts: MethodParts[PromptSource]) -> None:
        super().__init__(parts, uses_reference=parts.config.grpo.kl_coef > 0)
        self.options = parts.config.refl
        self.repeats = self.options.repeats()
        self._vae_stats = parts.vae_stats
        self._waiting: tuple[Backpropagated, Part, Denoised] | None = None  # its backward pass gives adjoints

    # ---- rollout -----------------------------------------------------------------------------------------------

    def rollout(self, transformer: nn.Module, rollout: int) -> Backpropagated:
        """Sample this rank's clips of a rollout, and take the gradient of their rewards by the clean latents."""
        collector = self.collector
        jobs, device, size = collector.jobs(rollout), collector.parallel.device, collector.batch_size
        spent: dict[str, float] = defaultdict(float)
        batch_scores: list[tuple[int, Scores]] = []
        videos: dict[int, Tensor] = {}  # clips that may be written
        steps, before = self._steps(rollout), dict[int, Sequence[Tensor]]()
        adjoints, values = dict[tuple[int, int], Tensor](), dict[tuple[int, int], float]()
        error: Exception | None = None
        for batch, first in enumerate(range(0, len(jobs), size)):
            chunk = jobs[first : first + size]
            with timed(spent, "rollout", device):
                conditions = collector.source.conditions([job.prompt for job in chunk])
                starts, ends = self._sample(transformer, chunk, conditions, steps)
            before |= {first + i: [start[i].clone() for start in starts] for i in range(len(chunk))}
            try:
                for position, clean in enumerate(ends if error is None else ()):
                    with timed(spent, "reward_gradient", device):
                        number = collector.parallel.data_rank * len(jobs) + first
                        adjoint, scores, total, pixels = self._adjoint(clean, chunk, number, conditions)
                    for i, job in enumerate(chunk):
                        adjoints[first + i, position], values[first + i, position] = adjoint[i].clone(), float(total[i])
                        if position == 0 and collector.shown.wants(job) and collector.parallel.owns_item(batch):
                            videos[first + i] = to_uint8(pixels[i])
                    if position == 0:
                        collector.witnesses.add(pixels, number)
                        batch_scores.append((number, scores))
            except Exception as caught:
                error = caught
        collector.parallel.raise_if_any_failed(error, f"scoring the clips of rollout {rollout}")
        scores = Scores.in_order(collector.parallel.gather_objects(batch_scores))
        collector.warn_unscored(rollout, scores)
        collector.shown.keep(jobs, videos, scores, collector.compare(scores))
        norms = [float(adjoint.norm()) for adjoint in adjoints.values()]
        stats = {
            "rollout": float(rollout),
            **score_stats(scores, collector.panel.weights, group=self.section.num_generations),
            "failed_clips": float(scores.failed.sum()),
            **collector.witnesses.stats(),
        }
        stats |= {"reward_gradient": sum(norms) / len(norms)}
        stats |= {f"seconds/{name}": seconds for name, seconds in spent.items()}
        return Backpropagated(
            jobs=jobs, num_ranks=collector.parallel.data_size, stats=stats, steps=steps,
            before=before, adjoints=adjoints, scores=values,
        )  # fmt: skip

    def dummy_rollout(self) -> Backpropagated:
        jobs, shape = self.collector.jobs(0)[: self.collector.batch_size], self.sampler.shape
        empty, positions = torch.zeros(shape, device=self.sampler.device), range(self.repeats)
        keys = [(i, position) for i in range(len(jobs)) for position in positions]
        return Backpropagated(
            jobs=jobs, num_ranks=self.collector.parallel.data_size, stats={}, steps=self._steps(0),
            before={i: [empty] * self.repeats for i in range(len(jobs))},
            adjoints=dict.fromkeys(keys, empty), scores=dict.fromkeys(keys, 0.0),
        )  # fmt: skip

    def _steps(self, rollout: int) -> list[int]:
        """Return the steps that are trained in a rollout, on all ranks, in the order in which they are trained."""
        allowed = self.options.gradient_steps(len(self.sampler.times))
        if self.options.refl_kind == "refl":
            return [random.Random(derive_seed(self.seed, "refl", rollout)).choice(allowed)]
        return list(reversed(allowed)) if self.options.refl_kind == "draft" else list(allowed) * self.repeats

    @torch.no_grad()
    def _sample(
        self, transformer: nn.Module, jobs: Sequence[RolloutSample], conditions: PromptEmbeds, steps: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return latents before each of the steps, in their order, and the clean latents that are scored.

        There are clean latents for each adjoint that a reward gives.
        """
        sampler, kind = self.sampler, self.options.refl_kind
        x = sampler.noise(jobs, "start")
        before: dict[int, Tensor] = {}
        last = max(steps)
        for step in range(last + 1):
            before[step] = x
            network = sampler.spec.network_at(float(sampler.times[step]), transformer)
            x = self._step(network, x, conditions, **self._step_arguments(step, len(jobs), is_trained=step == last))[1]
        if kind != "draft-lv":
            return [before[step] for step in steps], [x]
        arguments = self._step_arguments(last, len(jobs))
        noises = [sampler.noise(jobs, f"renoised {copy}") for copy in range(self.repeats)]
        noised = [sampler.process.add_noise(x, noise, arguments["time"]) for noise in noises]
        return noised, [self._step(transformer, latents, conditions, **arguments)[1] for latents in noised]

    def _step_arguments(self, step: int, count: int, *, is_trained: bool = True) -> dict[str, Any]:
        """Return time and coefficients of a step for `count` clips; see `Denoised`."""
        sampler, index = self.sampler, torch.full((count,), step)
        predicts = is_trained and self.options.refl_kind == "refl"
        now = None if predicts else sampler.tables.deterministic.at_steps(index, sampler.device)
        return {"time": sampler.time(index), "now": now}

    def _step(
        self, network: nn.Module, x: Tensor, conditions: PromptEmbeds, *, time: Tensor, now: Transitions | None
    ) -> tuple[Tensor, Tensor]:
        """Return the network's prediction, and the latents after a step."""
        process, prediction = self.sampler.process, self.sampler.predict(network, x, time, conditions)
        if now is None:
            return prediction, process.x0_from(prediction, x, time)
        return prediction, transition_mean(process, prediction, x, time, now)

    def _adjoint(
        self, clean: Tensor, jobs: Sequence[RolloutSample], number: int, conditions: PromptEmbeds
    ) -> tuple[Tensor, Scores, Tensor, Tensor]:
        """Return the gradient of the weighted rewards by clean latents, the scores, the weighted rewards, and pixels.

        The weighted rewards are `[B]`.

        Args:
            clean: `[B, C, T, H, W]` as they are denoised.
            jobs: the clips.
            number: number of the first clip within the rollout.
            conditions: text conditioning of the clips.

        Raises:
            RewardError: a reward failed, or its gradient is not finite, and that is not masked.
        """
        collector, rollout = self.collector, jobs[0].rollout
        clips = self.sampler.clips(clean, conditions)
        frames = self._frames(rollout, clips.shape[2])
        prompts = [job.prompt for job in jobs]

        def score(videos: Tensor) -> tuple[Tensor, tuple[Scores, Tensor, Tensor]]:
            scores, total = collector.panel.differentiate(
                videos,
                [prompt.text for prompt in prompts],
                fps=collector.reward_fps,
                rollout=rollout,
                first_clip=number,
                images=collector.source.reward_images(prompts),
                columns=[prompt.columns for prompt in prompts],
            )
            return total.sum(), (scores, total.detach(), videos.detach().cpu())

        with phase(REWARD):
            gradient, (scores, total, pixels) = collector.source.decode_gradient(
                clips[:, :, frames], self._vae_stats, score, checkpointing=self.options.checkpoint_vae
            )
        broken = ~gradient.flatten(1).isfinite().all(dim=1).cpu() & ~scores.failed
        if broken.any() and self.section.reward_on_error == "raise":
            position = int(broken.nonzero()[0])
            raise RewardError(
                f"the gradient of the rewards of clip {number + position}, prompt {jobs[position].prompt.text!r}, is "
                "not finite; --reward_on_error mask leaves such clips out"
            )
        gradient[(broken | scores.failed).to(gradient.device)] = 0.0
        adjoint = torch.zeros_like(clips)
        adjoint[:, :, frames] = gradient.to(clean.device)
        return self.sampler.denoised(adjoint), scores, total, pixels

    def _frames(self, rollout: int, total: int) -> slice:
        """Return the latent frames that are decoded and scored."""
        count = min(self.options.reward_frames or total, total)
        first = random.Random(derive_seed(self.seed, "reward frames", rollout)).randint(0, total - count)
        return slice(first, first + count)

    # ---- batches -----------------------------------------------------------------------------------------------

    def micro_batch(self, transformer: nn.Module, collected: Backpropagated, rollout: int, part: Part) -> Denoised:
        """Return one step of each clip of a part, after the backward passes of the later steps."""
        self._take_adjoints()
        device, position = self.sampler.device, part.repeat
        before = to_device(torch.stack([collected.before[i][position] for i in part.clips]), device)
        goes_on = self.options.refl_kind == "draft" and position + 1 < self.repeats
        share = to_device(torch.tensor(part.shares), device)
        batch = Denoised(
            before=before.requires_grad_(goes_on),
            **self._step_arguments(collected.steps[position], len(part.clips)),
            adjoint=to_device(torch.stack([collected.adjoints[i, position] for i in part.clips]), device),
            score=to_device(torch.tensor([collected.scores.get((i, position), 0.0) for i in part.clips]), device),
            weight=share * (self.repeats if self.options.refl_kind == "draft" else 1),
            share=share,
            scale=torch.zeros((), device=device, requires_grad=True) if goes_on else None,
            conditions=self.collector.source.conditions([collected.jobs[i].prompt for i in part.clips]),
        )
        self._waiting = (collected, part, batch) if goes_on else None
        return batch

    def _take_adjoints(self) -> None:
        """Store the adjoints of the next earlier step: the gradients by `before` of the last backward pass."""
        if self._waiting is None:
            return
        collected, part, batch = self._waiting
        self._waiting = None
        if batch.before.grad is None or batch.scale is None or batch.scale.grad is None:
            return  # it ran out of memory, and is repeated
        factor = batch.scale.grad * batch.weight
        for row, (clip, share) in enumerate(zip(part.clips, part.shares, strict=True)):
            if share:  # clips that only fill up have no share
                collected.adjoints[clip, part.repeat + 1] = -batch.before.grad[row] / factor[row]

    # ---- loss --------------------------------------------------------------------------------------------------

    def loss(self, transformer: nn.Module, batch: Denoised) -> tuple[Tensor, Metrics]:
        transformer.eval()
        arguments: dict[str, Any] = {"time": batch.time, "now": batch.now}
        prediction, after = self._step(transformer, batch.before, batch.conditions, **arguments)
        along = (batch.adjoint * after).flatten(1).sum(1)
        # Its value is the reward, and its gradient that of the adjoint's product.
        loss = -(batch.weight * (batch.score + (along - along.detach()))).sum()
        metrics: dict[str, Tensor] = {}
        if self.reference is not None:
            with torch.no_grad(), self.reference(transformer) as network:
                reference = self._step(network, batch.before, batch.conditions, **arguments)[0]
            divergence = velocity_divergence(prediction, reference)
            loss = loss + self.section.kl_coef * (batch.share * divergence).sum()
            metrics["kl"] = (batch.share * divergence.detach()).sum()
        if batch.scale is not None:
            loss = loss + batch.scale
        return loss, {"loss": loss.detach(), **metrics}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise InputError(f"reward gradients have no state to restore, got {sorted(state)}", "mismatch")
