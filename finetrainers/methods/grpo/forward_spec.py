"""Requirements of methods that train noised clips, checked before they are loaded; see `MethodSpec`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from finetrainers.config.checks.findings import Finding
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.root import TrainConfig
from finetrainers.config.values import range_between

from .option_rules import check_noised_clips
from .prompts.plan import PromptPlan
from .spec import RewardFinetuning

if TYPE_CHECKING:
    from finetrainers.models.spec import ModelSpec


class NoisedClips(RewardFinetuning):
    """Methods that add new noise to sampled clips, at several noise levels, and train on them."""

    trains_noised = True

    def option_rules(self, config: TrainConfig, facts: Facts, *, world_size: int) -> Iterator[Finding]:
        yield from super().option_rules(config, facts, world_size=world_size)
        yield from check_noised_clips(config.grpo)

    def check(self, plan: PromptPlan, config: TrainConfig, *, spec: ModelSpec) -> None:
        super().check(plan, config, spec=spec)
        section, steps = config.grpo, config.grpo.sampling_steps
        times = spec.sampling_times(
            spec.load_scheduler(), steps, num_tokens=plan.num_tokens, shift=section.shift
        ).tolist()
        if not any(
            spec.facts.trains_at(times[step]) for step in range_between(section.noise_level_range, steps, steps)
        ):
            message = "holds no noise level of the trained expert; use a wider range"
            raise ConfigError([Problem("--noise_level_range", message, "conflict")])

    def repeats(self, config: TrainConfig) -> int:
        return config.grpo.noise_levels


class ImplicitPolicies(NoisedClips):
    """DiffusionNFT, whose clips are sampled by a copy of the policy that follows it."""

    contrasts = True
    kl_option = "nft_kl"

    def weight_copies(self, config: TrainConfig) -> list[str]:
        return ["the sampling policy"]


class AdvantageMatching(NoisedClips):
    """Advantage Weighted Matching, which clips the ratio of matching losses."""

    matches = True
    clips_ratio = True

    def weight_copies(self, config: TrainConfig) -> list[str]:
        average = ["the EMA of --old_policy_kl"] if config.grpo.old_policy_kl else []
        return average + (["the policy of the rollout"] if config.grpo.updates_per_rollout > 1 else [])
