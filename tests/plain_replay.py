"""Reward finetuning without shared starts: each clip of a prompt is sampled and trained by itself, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from finetrainers.methods.grpo.rollout.collect import RolloutCollector
from finetrainers.parallel.strategy import Strategy

T = TypeVar("T")


def share_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let runs sample and train each clip by itself, as in earlier versions."""
    patch.setattr("finetrainers.methods.grpo.rollout.collect.shares_starts", lambda _: False)


def score_latents(patch: pytest.MonkeyPatch) -> None:
    """Let rewards score latents: clips of an untrained VAE differ so little that advantages are mostly rounding."""
    patch.setattr(RolloutCollector, "decode", lambda _, latents: latents[:, :3].transpose(1, 2).sigmoid())


def compare_with_plain_replay(train: Callable[[str], T]) -> tuple[T, T]:
    """Return the results of `train("shared")` and `train("plain")`, runs of one update on one process with equal
    gradients.

    Whatever clips show, their brightness is 0, 0.37, 0.74, 0.11, ... in the order of sampling: scores have no rounding.
    The batch size should be 1, since products of other sizes round differently, which takes 5e-6 of some gradients.
    """
    gradients: list[dict[int, Tensor]] = []
    clip_grad_norm, results = Strategy.clip_grad_norm, []

    def watched(parallel: Any) -> Any:
        weights = enumerate(parallel._parameters)
        gradients.append({number: w.grad.double().flatten() for number, w in weights if w.grad is not None})
        return clip_grad_norm(parallel)

    for name in ("shared", "plain"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RolloutCollector, "decode", _brightness_in_turn())
            patch.setattr(Strategy, "clip_grad_norm", watched)
            if name == "plain":
                share_nothing(patch)
            results.append(train(name))
    shared, plain = gradients
    assert shared.keys() == plain.keys()
    ours, theirs = (torch.cat([*each.values()]) for each in gradients)
    assert (ours - theirs).norm() <= 2e-6 * theirs.norm() > 0
    return results[0], results[1]


def _brightness_in_turn() -> Callable[[RolloutCollector, Tensor], Tensor]:
    numbers = count()

    def decode(_: RolloutCollector, latents: Tensor) -> Tensor:
        values = torch.tensor([next(numbers) * 0.37 % 1 for _ in latents])
        return values.view(-1, 1, 1, 1, 1).expand_as(latents[:, :3].transpose(1, 2))

    return decode
