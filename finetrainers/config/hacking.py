"""Evidence of reward hacking (`--hacking_guard`): held-out rewards, or else witnesses and the KL to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .methods import trait
from .rewards import RewardEntry, options_text, reward_labels
from .root import TrainConfig

_INTERVAL = 10  # rollouts of one judgment by the KL, where nothing is evaluated
#: Prompts that a witness is averaged over, at least, and clips of a rollout that it scores, if there are as many.
WITNESSED = 16
#: Rewards without weights that score clips of every rollout, and whether they are shares, whose rise counts as a fall.
WITNESSES = {"motion": False, "sharpness": False, "brightness": True, "saturation": True}


@dataclass(frozen=True)
class HackingRule:
    """Rule for the detection of reward hacking.

    Attributes:
        action: reaction to reward hacking.
        held_out: labels of the evaluated rewards that are not trained; without any, the KL is judged.
        patience: judgments in a row that must detect it.
        every: optimizer steps between judgments by the KL.
        witnesses: names of the rewards of the rollouts' own clips, which must not collapse; without held-out rewards,
            they are compared with the trained reward.
        prompts, updates: prompts and optimizer steps of a rollout.
    """

    action: Literal["warn", "stop"]
    held_out: tuple[str, ...]
    patience: int
    every: int
    witnesses: tuple[str, ...] = ()
    prompts: int = 1
    updates: int = 1


def hacking_rule(config: TrainConfig) -> HackingRule | None:
    """Return the rule of a run of reward finetuning, or None if the guard is off or there is nothing to judge by."""
    section, every = config.grpo, config.validation.eval_steps
    held_out = held_out_rewards(config) if every else ()
    watching = witnesses(config)
    if section.hacking_guard == "off" or not (held_out or watching or measures_kl(config)):
        return None
    return HackingRule(
        section.hacking_guard or "warn", held_out, section.hacking_patience,
        every or _INTERVAL * section.updates_per_rollout, watching, section.prompts_per_step,
        section.updates_per_rollout,
    )  # fmt: skip


def witnesses(config: TrainConfig) -> tuple[str, ...]:
    """Return the names of the witnesses, which are not trained; none if the guard is off. An image has no motion."""
    section = config.grpo
    if section.hacking_guard == "off" or section.rollout_size is None:
        return ()
    unusable = {entry.reward for entry in section.reward if entry.weight}
    unusable |= {"motion"} if section.rollout_size[0] == 1 else set()
    return tuple(name for name in WITNESSES if name not in unusable)


def measures_kl(config: TrainConfig) -> bool:
    """Return whether the loss measures the KL to the reference model."""
    option = trait(config.training.method, "kl_option")
    return bool(option and config.get(option))


def held_out_rewards(config: TrainConfig) -> tuple[str, ...]:
    """Return the labels of the rewards that score held-out prompts and are not trained on."""
    if config.validation.eval_prompts is None:
        return ()
    trained = {identity(entry) for entry in config.grpo.reward if entry.weight}
    entries = config.validation.eval_reward or config.grpo.reward
    return tuple(
        label for label, entry in zip(reward_labels(entries), entries, strict=True) if identity(entry) not in trained
    )


def trained_labels(trained: Sequence[RewardEntry], evaluated: Sequence[RewardEntry]) -> dict[str, float]:
    """Return the weight of each reward for training, by its label in the evaluation; empty if one is not evaluated."""
    labels = dict(zip(map(identity, evaluated), reward_labels(evaluated), strict=True))
    weights = {identity(entry): entry.weight for entry in trained if entry.weight}
    return {labels[key]: weight for key, weight in weights.items()} if weights.keys() <= labels.keys() else {}


def identity(entry: RewardEntry) -> tuple[str, str]:
    """Return the key that is equal for entries of the same reward."""
    return entry.name, options_text(entry)
