"""Requirements of methods that train noised clips, checked before they are loaded; see `MethodSpec`. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from finetrainers.config.checks.findings import Finding
from finetrainers.config.facts import Facts
from finetrainers.config.root import TrainConfig

from .option_rules import check_noised_clips
from .spec import RewardFinetuning


class NoisedClips(RewardFinetuning):
    """Methods that add new noise to sampled clips, at several noise levels, and train on them."""

    trains_noised = True

    def option_rules(self, config: TrainConfig, facts: Facts, *, world_size: int) -> Iterator[Finding]:
        yield from super().option_rules(config, facts, world_size=world_size)
        yield from check_noised_clips(config.grpo)

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
