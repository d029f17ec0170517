"""Requirements of reward gradients that are checked before they are loaded; see `MethodSpec`. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from finetrainers.config.checks.findings import Finding
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig

from .grpo.option_rules import check_reward_gradients
from .grpo.prompts.plan import PromptPlan
from .grpo.spec import RewardFinetuning, sampled_clips
from .spec import MethodMemory, registry

if TYPE_CHECKING:
    from finetrainers.models.spec import ModelSpec


class DifferentiableRewards(RewardFinetuning):
    """Reward gradients, which sample clips for prompts, as policy gradients do, and differentiate the rewards."""

    compares = False
    differentiates = True

    def option_rules(self, config: TrainConfig, facts: Facts, *, world_size: int) -> Iterator[Finding]:
        yield from super().option_rules(config, facts, world_size=world_size)
        yield from check_reward_gradients(config)

    def repeats(self, config: TrainConfig) -> int:
        return config.refl.repeats()

    def problems(self, config: TrainConfig) -> list[Problem]:
        problems = super().problems(config)
        if problems:
            return problems
        reasons = [registry().gradient_problem(entry) for entry in config.grpo.reward if entry.weight]
        reasons += [registry().single_clip_problem(e) for e in config.grpo.reward if registry().compares_clips(e)]
        return [Problem("--reward", f"{reason}", "unsupported") for reason in reasons if reason is not None]

    def check(self, plan: PromptPlan, config: TrainConfig, *, spec: ModelSpec) -> None:
        super().check(plan, config, spec=spec)
        section = config.grpo
        times = spec.sampling_times(
            spec.load_scheduler(), section.sampling_steps, num_tokens=plan.num_tokens, shift=section.shift
        )
        steps = config.refl.gradient_steps(section.sampling_steps)
        others = [step + 1 for step in steps if not spec.facts.trains_at(float(times[step]))]
        if others:
            message = (
                f"backpropagates through step {others[0]} of {section.sampling_steps}, which belongs to the other "
                "expert; train --expert low, or use --refl_kind refl with a --refl_range of this expert"
            )
            raise ConfigError([Problem("--method refl", message, "conflict")])

    def decode_gradient(
        self, config: TrainConfig, size: tuple[int, int, int], geometry: Geometry
    ) -> tuple[tuple[int, int, int], bool]:
        frames, height, width = size
        if config.refl.reward_frames is not None:
            frames = min(frames, (config.refl.reward_frames - 1) * geometry.temporal + 1)
        return (frames, height, width), not config.refl.checkpoint_vae

    def scoring_bytes(self, config: TrainConfig, size: tuple[int, int, int], *, fps: float) -> float | None:
        """Return the bytes that rewards take while they score clips of a size, or None if not known.

        Graphs of a micro-batch's rewards are stored until its backward pass, except those of rewards that are
        recomputed one by one. Evaluation rewards are scored without graphs.
        """
        sizes = [super().scoring_bytes(config, size, fps=fps)]
        batch = {"batch_size": config.dataloader.batch_size}
        stored, recomputed = 0.0, 0.0
        for entry in config.grpo.reward:
            if entry.weight:
                graph = registry().graph_bytes(entry.model_copy(update=batch), size, fps=fps)
                sizes.append(graph)
                if registry().resolve_reward(entry.reward).recomputes:
                    recomputed = max(recomputed, graph or 0.0)
                else:
                    stored += graph or 0.0
        return None if None in sizes else max(sizes[0] or 0.0, stored + recomputed)

    def memory(
        self, config: TrainConfig, latent: Sequence[int], *, batch_size: int, trained: float, reference: float
    ) -> MethodMemory:
        """Return the memory of each clip's latents before every trained step and of their adjoints, in fp32."""
        needs_copy = config.training.training_type == "full-finetune" and self.uses_reference(config)
        each = 4.0 * math.prod(latent) * 2 * self.repeats(config)
        return MethodMemory(
            copies=reference if needs_copy else 0.0,
            trajectories=sampled_clips(config) * each,
            batch_size=batch_size * self.branches(config),
        )
