"""Learning on a small policy: a reward whose sign depends on the prompt is found by every algorithm, a shuffled one by none.

Plain brightness would be no test: an optimizer's drift alone can saturate it.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from policies import flow, make_collector, network, vp
from torch import nn

from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.grpo.nft import NFT, Follow, OldPolicy


def train(method: Any, model: nn.Module, *, rollouts: int, lr: float = 1e-3) -> list[float]:
    """Mean reward of each rollout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    rewards = []
    for step in islice(method.steps(0, model), rollouts * method.updates):
        for batch in step:
            method.loss(model, batch)[0].backward()
        rewards += [value for name, value in step.metrics.items() if name.startswith("reward/")]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return rewards


def gain(rewards: list[float]) -> float:
    return sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3


def grpo(*rewards: str, **changes: Any) -> GRPO:
    windows = {"size": 2, "span": (0.0, 0.7), "strategy": "progressive", "every": 3}
    collector = make_collector(**{"windows": windows, "reward": rewards, **changes})
    return GRPO(
        collector=collector, reference=None, evaluation=None, updates=1, epsilon=None, ratio_norm=False, kl_coef=0.0,
        kl_space="velocity", seed=0,
    )  # fmt: skip


def nft(model: nn.Module, *rewards: str) -> NFT:
    return NFT(
        collector=make_collector(stochastic=False, same_noise=False, reward=rewards), old=OldPolicy(model),
        follow=Follow(0.0, 0.05, 0.5), reference=None, evaluation=None, updates=1, levels=2, beta=0.1, kl=0.0,
        advantage_clip=5.0, seed=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "eta", "process"), [("flow", 0.7, flow), ("dance", 0.5, flow), ("cps", 0.7, flow), ("ddim", 0.5, vp)]
)
def test_policy_gradients_learn(kernel: str, eta: float, process: Any) -> None:
    model = network()
    method = grpo("policies:signed_brightness", kernel=kernel, eta=eta, make_process=process)
    assert gain(train(method, model, rollouts=20)) > 0.15


def test_full_trajectories_learn() -> None:
    model = network()
    method = grpo("policies:signed_brightness", kernel="dance", eta=0.5, windows={"size": 0, "timestep_fraction": 0.6})
    assert gain(train(method, model, rollouts=20)) > 0.15


def test_nft_learns() -> None:
    model = network()
    assert gain(train(nft(model, "policies:signed_brightness"), model, rollouts=30)) > 0.15


@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_a_reward_that_knows_nothing_teaches_nothing(algorithm: str) -> None:
    """The signed brightness is only logged; what is trained on is noise."""
    model = network()
    rewards = ("policies:shuffled", "policies:signed_brightness=0")
    method: Any = grpo(*rewards) if algorithm == "grpo" else nft(model, *rewards)
    found = train(method, model, rollouts=30)
    assert abs(gain(found[1::2])) < 0.1
