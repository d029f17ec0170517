"""Which rewards score held-out prompts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.methods.grpo.rollout.evaluate import PromptEvaluation


def test_rewards_are_loaded_in_turns() -> None:
    """Their networks may have billions of weights, which pass through host memory on every process of a machine."""
    turns: list[str] = []

    def one_at_a_time(what: str, load: Callable[[], Any]) -> Any:
        turns.append(what)
        return load()

    def parts(*rewards: str) -> Any:
        validation = SimpleNamespace(eval_reward=[RewardEntry(**parse_reward(name)) for name in rewards])
        config = SimpleNamespace(
            grpo=SimpleNamespace(reward_on_error="raise", reward=[], reward_device=None),
            validation=validation,
            training=SimpleNamespace(seed=0),
        )
        return SimpleNamespace(
            config=config,
            source=SimpleNamespace(plan=SimpleNamespace(eval_prompts=("a red ball",))),
            parallel=SimpleNamespace(one_at_a_time=one_at_a_time),
        )

    collector: Any = SimpleNamespace(panel="the one trained on")
    found = PromptEvaluation(parts("brightness"), collector)
    assert len(turns) == 1
    assert list(found.panel.weights) == ["brightness"]
    assert PromptEvaluation(parts(), collector).panel == collector.panel
    assert len(turns) == 1
