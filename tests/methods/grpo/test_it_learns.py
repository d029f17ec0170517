"""Learning on a small policy: every algorithm learns a reward whose sign depends on the prompt, none a shuffled one.

Plain brightness would be no test: an optimizer's drift alone can saturate it.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from policies import flow, make_awm, make_grpo, make_nft, network, vp
from torch import nn

from finetrainers.methods.grpo.method import GRPO


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


def grpo(*process: Any, **options: Any) -> GRPO:
    window = {"window_range": [0.0, 0.7], "window_strategy": "progressive", "window_every": 3}
    return make_grpo(*process, **{**window, **options})


def nft(model: nn.Module, **options: Any) -> Any:
    return make_nft(model, old_policy_decay=[0.0, 0.05, 0.5], nft_beta=0.1, **options)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kernel", "eta", "process"), [("flow", 0.7, flow), ("dance", 0.5, flow), ("cps", 0.7, flow), ("ddim", 0.5, vp)]
)
def test_policy_gradients_learn(kernel: str, eta: float, process: Any) -> None:
    model = network()
    method = grpo(process, sampler=kernel, eta=eta)
    assert gain(train(method, model, rollouts=20)) > 0.15


@pytest.mark.rotating("learning")
def test_full_trajectories_learn() -> None:
    model = network()
    method = grpo(sampler="dance", eta=0.5, window_size=0, timestep_fraction=0.6)
    assert gain(train(method, model, rollouts=20)) > 0.15


@pytest.mark.rotating("learning")
def test_nft_learns() -> None:
    model = network()
    assert gain(train(nft(model), model, rollouts=30)) > 0.15


@pytest.mark.rotating("learning")
@pytest.mark.parametrize(("kind", "process"), [("ghuber", flow), ("uniform", vp)])
def test_awm_learns(kind: str, process: Any) -> None:
    model = network()
    assert gain(train(make_awm(model, process, matching_loss=kind), model, rollouts=30)) > 0.15


@pytest.mark.rotating
@pytest.mark.parametrize("algorithm", ["grpo", "nft", "awm"])
def test_a_reward_that_knows_nothing_teaches_nothing(algorithm: str) -> None:
    """The signed brightness is only logged; what is trained on is noise."""
    model = network()
    rewards = ["policies:shuffled", "policies:signed_brightness=0"]
    makers: dict[str, Any] = {"grpo": lambda model, **options: grpo(**options), "nft": nft, "awm": make_awm}
    method = makers[algorithm](model, reward=rewards)
    found = train(method, model, rollouts=30)
    assert abs(gain(found[1::2])) < 0.1
