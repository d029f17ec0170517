"""What is watched while a policy is trained: where gradients come from, and ratios that must be 1."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.grpo.objective import gradient_by_noise


def test_gradients_are_summed_by_noise_level() -> None:
    generator = torch.Generator().manual_seed(0)
    prediction = torch.randn(5, 2, 1, 3, 3, generator=generator, requires_grad=True)
    factor = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0])
    loss = (factor * (prediction**2).flatten(1).sum(1)).sum()
    found = gradient_by_noise(loss, prediction, torch.tensor([0.1, 0.3, 0.26, 1.0, 0.6]))
    norms = 2 * factor * prediction.detach().flatten(1).norm(dim=1)
    assert found == {
        "gradient/0.00-0.25": pytest.approx(float(norms[0])),
        "gradient/0.25-0.50": pytest.approx(float(norms[1] + norms[2])),
        "gradient/0.50-0.75": 0.0,
        "gradient/0.75-1.00": pytest.approx(float(norms[3])),
    }
    loss.backward()  # the graph is still there
    assert prediction.grad is not None


def test_the_largest_ratio_error_of_a_step_is_the_sum_of_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    method = GRPO.__new__(GRPO)
    method.epsilon, method.sampler = 0.1, SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    batch = SimpleNamespace(is_first=True, is_fresh=True, share=torch.tensor([0.5, 0.5, 0.0]))
    grown = []
    with caplog.at_level(logging.WARNING):
        for first, ratios in ((True, [1.0, 1.02, 9.0]), (False, [1.0, 0.9, 1.0]), (False, [0.93, 1.0, 1.0])):
            batch.is_first = first
            grown.append(float(method._increase_ratio_error(batch, torch.tensor(ratios))))  # type: ignore[arg-type]
        method.look()
    assert sum(grown) == pytest.approx(0.1)
    assert grown == pytest.approx([0.02, 0.08, 0.0])
    assert sum("off by 0.1" in message for message in caplog.messages) == 1  # said once
    batch.is_first, batch.is_fresh = True, False
    assert method._increase_ratio_error(batch, torch.tensor([2.0, 1.0, 1.0])) == 0  # type: ignore[arg-type]
