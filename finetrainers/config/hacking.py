"""Evidence of reward hacking (`--hacking_guard`): held-out rewards, or else the KL to the reference model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .methods import trait
from .rewards import RewardEntry, options_text, reward_labels
from .root import TrainConfig

_INTERVAL = 10  # rollouts of one judgment by the KL, where nothing is evaluated


@dataclass(frozen=True)
class HackingRule:
    """Rule for the detection of reward hacking.

    Attributes:
        action: reaction to reward hacking.
        held_out: labels of the evaluated rewards that are not trained; without any, the KL is judged.
        patience: judgments in a row that must detect it.
        every: optimizer steps between judgments by the KL.
    """

    action: Literal["warn", "stop"]
    held_out: tuple[str, ...]
    patience: int
    every: int


def hacking_rule(config: TrainConfig) -> HackingRule | None:
    """Return the rule of a run of reward finetuning, or None if the guard is off or there is nothing to judge by."""
    section, every = config.grpo, config.validation.eval_steps
    held_out = held_out_rewards(config) if every else ()
    if section.hacking_guard == "off" or not (held_out or measures_kl(config)):
        return None
    interval = every or _INTERVAL * section.updates_per_rollout
    return HackingRule(section.hacking_guard or "warn", held_out, section.hacking_patience, interval)


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
