"""Rollouts outside of a run: clips of given prompts with their log-probabilities, without rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.config.methods import trait
from finetrainers.data.loading.precompute import TEXT_BATCH_SIZE
from finetrainers.diffusion.policy import log_density, transition_mean
from finetrainers.methods.base import MethodParts
from finetrainers.models.spec import ModelComponents, PromptEmbeds
from finetrainers.utils.failures import InputError

from ..prompts.prompts import Prompt, RolloutSample
from .clip_counts import shared_rows, shares_starts
from .sampler import Sampler


@dataclass(frozen=True)
class Rollouts:
    """N clips, n of each prompt in turn, with their K trained transitions.

    Attributes:
        prompts: prompt of each clip.
        latents: clean latents of the clips, `[N, C, T, H, W]`, for `Model.decode`.
        log_probs: log-density of each transition under the policy that sampled it, averaged over the latent, `[N, K]`.
        steps: denoising steps of the transitions, `[N, K]`.
        before, after: latents on both sides of each transition, `[N, K, C, T, H, W]`.
        conditions: text conditioning of the clips, and with guidance that of the empty prompt, in as many rows more.
    """

    prompts: Sequence[str]
    latents: Tensor
    log_probs: Tensor
    steps: Tensor
    before: Tensor
    after: Tensor
    conditions: PromptEmbeds

    def __len__(self) -> int:
        return len(self.prompts)


class RolloutPolicy:
    """The sampling policy of a configuration; see `Sampler`."""

    def __init__(self, parts: MethodParts[Any]) -> None:
        """Args:
        parts: the model; it has no source of batches.

        Raises:
            InputError: the method does not sample with log-probabilities, or the model starts from an image.
        """
        self.config, self.spec = parts.config, parts.spec
        if not trait(self.config.training.method, "trains_steps") or self.config.grpo.rollout_size is None:
            raise InputError('rollouts require method="grpo" and a rollout_size', "required")
        if self.spec.facts.needs_image:
            raise InputError(
                f"rollouts of {self.spec.name} start from images; only prompts are supported", "unsupported"
            )
        self.sampler = Sampler(parts)

    def encode(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Return the conditioning of prompts, encoded together as a run encodes them; see `Rollouts`."""
        texts, rows = sorted({"", *prompts}), list[PromptEmbeds]()
        for first in range(0, len(texts), TEXT_BATCH_SIZE):
            encoded = self.spec.encode_text(encoders, texts[first : first + TEXT_BATCH_SIZE])
            rows += [
                PromptEmbeds({k: v[i : i + 1].cpu() for k, v in encoded.tensors.items()}) for i in range(len(encoded))
            ]
        is_guided = self.config.grpo.rollout_cfg != 1.0
        by_text = dict(zip(texts, rows, strict=True))
        order = [by_text[prompt] for prompt in prompts] + ([by_text[""]] * len(prompts) if is_guided else [])
        return PromptEmbeds.cat(order).trimmed().to(self.sampler.device)

    def sample(
        self, network: nn.Module, encoders: ModelComponents, prompts: Sequence[str], *, count: int, rollout: int
    ) -> Rollouts:
        """Sample `count` clips of each prompt; their noise depends on the seed, the rollout and their places in it."""
        section = self.config.grpo.model_copy(update={"num_generations": count, "prompts_per_step": len(prompts)})
        config = self.config.model_copy(update={"grpo": section})
        jobs = [
            RolloutSample(rollout, slot, Prompt(prompt, "prompts"), generation)
            for slot, prompt in enumerate(prompts)
            for generation in range(count)
        ]
        texts = [job.prompt.text for job in jobs]
        conditions, sampler, batch_size = self.encode(encoders, texts), self.sampler, config.dataloader.batch_size
        is_shared, rows = shares_starts(config), shared_rows(config, 1)
        shared = sampler.start_batches(
            network, jobs, [jobs], lambda chunk: _rows(conditions, [jobs.index(job) for job in chunk], len(jobs)),
            batch_size=batch_size, rows=rows, calls=-(-len(prompts) // rows),
        ) if is_shared else {}  # fmt: skip
        latents, replays = [], []
        for first in range(0, len(jobs), batch_size):
            chunk = range(first, min(first + batch_size, len(jobs)))
            inputs = _rows(conditions, chunk, len(jobs))
            clean, stored = sampler.rollout(network, [jobs[i] for i in chunk], inputs, shared.get(first))
            latents.append(sampler.clips(clean, inputs))
            replays += stored
        stacked = {
            name: torch.stack([getattr(replay, name) for replay in replays])
            for name in ("steps", "before", "after", "log_old")
        }
        log_probs = stacked.pop("log_old")
        return Rollouts(texts, torch.cat(latents), log_probs, conditions=conditions, **stacked)

    def log_probs(self, network: nn.Module, rollouts: Rollouts, transition: int, clips: Sequence[int]) -> Tensor:
        """Return the log-density of a transition of clips under the present network, `[B]`; see `Rollouts`."""
        sampler, batch_size = self.sampler, self.config.dataloader.batch_size
        if not 0 <= transition < rollouts.log_probs.shape[1]:
            raise InputError(f"expected a transition from 0 to {rollouts.log_probs.shape[1] - 1}, got {transition}")
        clips = [range(len(rollouts))[int(clip)] for clip in clips]
        if not clips:
            raise InputError("expected clips, got none")
        values = []
        for first in range(0, len(clips), batch_size):
            chunk = list(clips[first : first + batch_size])
            steps = rollouts.steps[chunk, transition]
            before, after = (
                latents[chunk, transition].to(sampler.device).float() for latents in (rollouts.before, rollouts.after)
            )
            time, now = sampler.time(steps), sampler.tables.stochastic.at_steps(steps, sampler.device)
            inputs = _rows(rollouts.conditions, chunk, len(rollouts))
            prediction = sampler.predict(network, before, time, inputs)
            mean = transition_mean(sampler.process, prediction, before, time, now)
            values.append(log_density(after, mean, now.std))
        return torch.cat(values)


def _rows(conditions: PromptEmbeds, clips: Sequence[int], count: int) -> PromptEmbeds:
    """Return the rows of some of `count` clips, followed by those of the empty prompt, if there are any."""
    guided = [count + clip for clip in clips] if len(conditions) > count else []
    return conditions.rows([*clips, *guided])
