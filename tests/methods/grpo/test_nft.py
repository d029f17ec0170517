"""DiffusionNFT against its formula, and what must hold of it whatever the reward."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from policies import SHAPE, flow, make_nft, network, vp
from torch import Tensor

from finetrainers.diffusion.process import FlowMatching
from finetrainers.methods.grpo.nft import NFT, implicit_loss
from finetrainers.methods.grpo.noised_clips import OldPolicy, decay


def draws(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, *SHAPE, generator=generator, dtype=torch.float64).float() for _ in range(count)]


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_a_clip_that_is_neither_good_nor_bad_teaches_nothing(beta: float) -> None:
    """With v = v_old both implicit policies are the old one, and their pulls cancel."""
    x0, eps, old = draws()
    velocity = old.clone().requires_grad_()
    t = torch.linspace(0.1, 0.9, 5)
    x_t = FlowMatching().add_noise(x0, eps, t)
    implicit_loss(FlowMatching(), velocity, old, x0, x_t, t, torch.full((5,), 0.5), beta).sum().backward()
    assert velocity.grad is not None
    assert velocity.grad.abs().max() == 0


def test_a_good_clip_is_plain_regression() -> None:
    """r = 1 and b = 1: the gradient of the flow-matching loss, up to a factor per clip."""
    x0, eps, old = draws()
    t = torch.linspace(0.1, 0.9, 5)
    x_t = FlowMatching().add_noise(x0, eps, t)
    velocity = old.clone().requires_grad_()
    implicit_loss(FlowMatching(), velocity, old, x0, x_t, t, torch.ones(5), 1.0).sum().backward()
    plain = old.clone().requires_grad_()
    ((plain - (eps - x0)) ** 2).flatten(1).mean(1).sum().backward()
    assert velocity.grad is not None
    assert plain.grad is not None
    factor = velocity.grad / plain.grad
    for row in factor:
        torch.testing.assert_close(row, row.flatten()[0].expand_as(row), rtol=1e-3, atol=0)
        assert row.flatten()[0] > 0


def test_the_loss_in_double_precision() -> None:
    x0, eps, old = (x.double() for x in draws())
    prediction = old + 0.1 * torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    t, r, b = torch.linspace(0.1, 0.9, 5).double(), torch.linspace(0, 1, 5).double(), 0.3
    s = t.view(-1, 1, 1, 1, 1)
    x_t = (1 - s) * x0 + s * eps
    expected = []
    for i in range(5):
        total = 0.0
        for share, v in (
            (r[i], b * prediction[i] + (1 - b) * old[i]),
            (1 - r[i], (1 + b) * old[i] - b * prediction[i]),
        ):
            error = x_t[i] - s[i] * v - x0[i]
            total = total + share * (error**2).mean() / error.abs().mean()
        expected.append(total / b)
    found = implicit_loss(
        FlowMatching(), prediction.float(), old.float(), x0.float(), x_t.float(), t.float(), r.float(), b
    )
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_the_old_policy_follows() -> None:
    assert [decay(n, (75, 0.0075, 0.999)) for n in (0, 75, 76, 10_000)] == [0.0, 0.0, 0.0075, 0.999]
    model = network()
    old = OldPolicy(model)
    before = model.outward.bias.detach().clone()
    with torch.no_grad():
        model.outward.bias += 1.0
    with old.applied():
        assert torch.equal(model.outward.bias, before)
    torch.testing.assert_close(model.outward.bias.detach(), before + 1)
    old.follow(0.25)
    torch.testing.assert_close(old.weights["outward.bias"], before + 0.75)
    old.follow(0.0)
    torch.testing.assert_close(old.weights["outward.bias"], before + 1)


@pytest.mark.parametrize("make_process", [flow, vp])
def test_the_first_update_starts_at_the_old_policy(make_process: Any) -> None:
    model = network(dropout=0.5)
    for batch in next(make_nft(model, make_process).steps(0, model)):
        assert make_nft(model, make_process).loss(model, batch)[1]["moved"].item() == 0.0


def test_clips_of_a_group_differ() -> None:
    """Without noise on the way, clips that start alike would be one clip, and the group would teach nothing."""
    model = network().eval()
    collected = make_nft(model).collector.collect(model, 0)
    assert len({float(latents.sum()) for latents in collected.latents.values()}) == len(collected.latents)


def test_resuming_at_a_rollout_changes_nothing() -> None:
    """Weights and the sampling policy, saved after the second step, go on as if nothing had been."""

    def run(method: NFT, model: Any, start: int, steps: int) -> None:
        for batches in islice(method.steps(start, model), steps):
            for batch in batches:
                method.loss(model, batch)[0].backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    straight = network()
    run(make_nft(straight, nft_beta=0.1), straight, 0, 4)
    first = network()
    method = make_nft(first, nft_beta=0.1)
    run(method, first, 0, 2)
    saved = {name: tensor.clone() for name, tensor in method.state_dict()["old"].items()}
    second = network(seed=1)
    resumed = make_nft(second, nft_beta=0.1)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict({"old": saved})
    run(resumed, second, 2, 2)
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
