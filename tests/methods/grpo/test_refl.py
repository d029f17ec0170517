"""Reward gradients on a small policy: against autograd through a plain loop in float64, and learning from them.

They are also pinned in tests/golden: FINETRAINERS_UPDATE_GOLDEN=1 writes the numbers again.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import Any

import pytest
import torch
from one_of import OneOf
from policies import (
    Adapted,
    Source,
    compare_with_record,
    flow,
    make_refl,
    network,
    picture,
    signed_brightness,
    vp,
)
from torch import Tensor, nn

from finetrainers.diffusion.policy import levels
from finetrainers.methods.base import Step
from finetrainers.methods.refl import RewardGradients

KINDS: dict[str, dict[str, Any]] = {
    "draft-1": {},
    "draft-3": {"draft_k": 3},
    "draft-lv": {"refl_kind": "draft-lv", "draft_lv_samples": 2},
    "refl": {"refl_kind": "refl", "refl_range": [0.4, 0.9]},
}


def first_step(
    method: RewardGradients, model: nn.Module, *, pieces: int = 1, scale: float = 1.0
) -> tuple[dict[str, Tensor], float]:
    """Its gradients, as the trainer makes them, and its loss."""
    step: Step[Any] = next(method.steps(0, model))
    total = 0.0
    for batch in step.split([pieces] * len(step)):
        loss = method.loss(model, batch)[0]
        (scale * loss).backward()
        total += float(loss.detach())
    found = {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found, total


def gradients(*args: Any, **options: Any) -> dict[str, Tensor]:
    return first_step(*args, **options)[0]


def expected(method: RewardGradients, model: nn.Module, *, kl: float = 0.0) -> dict[str, Tensor]:
    """The same, from the definition: autograd through all steps that have a gradient at once."""
    model, source, sampler = deepcopy(model).double(), Source(4), method.sampler
    process, times, options = sampler.process, sampler.times, method.options
    alpha, sigma = levels(process, times)
    jobs = method.collector.jobs(0)
    text = torch.stack([source.embedding(job.prompt) for job in jobs]).double()

    def split(prediction: Tensor, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Clean latents and noise."""
        a, s = alpha[step], sigma[step]
        if process.is_flow:
            return x - s * prediction, x + (1 - s) * prediction
        return a * x - s * prediction, s * x + a * prediction

    def predict(x: Tensor, step: int) -> Tensor:
        level = times[step].double() / (1 if process.is_flow else 1000)
        return model(x, level.expand(len(x)), text)

    def move(x: Tensor, step: int) -> Tensor:
        x0, eps = split(predict(x, step), x, step)
        return alpha[step + 1] * x0 + sigma[step + 1] * eps

    def divergence(x: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            model.disable_adapters()
            reference = predict(x, step)
            model.enable_adapters()
        return ((predict(x, step) - reference) ** 2).mean()

    def reward(x: Tensor) -> Tensor:
        return signed_brightness(source.pixels(x), [job.prompt.text for job in jobs]).mean()

    x, last = sampler.noise(jobs, "start").double(), len(times) - 1
    chosen = method._steps(0)
    penalty: Any = 0.0
    if options.refl_kind == "refl":
        (stop,) = chosen
        with torch.no_grad():
            for step in range(stop):
                x = move(x, step)
        total = reward(split(predict(x, stop), x, stop)[0])
    elif options.refl_kind == "draft-lv":
        with torch.no_grad():
            for step in range(last + 1):
                x = move(x, step)
        noises = [sampler.noise(jobs, f"renoised {copy}").double() for copy in range(options.draft_lv_samples)]
        total = sum(reward(move(alpha[last] * x + sigma[last] * eps, last)) for eps in noises) / len(noises)
    else:
        for step in range(last + 1):
            if step == last + 1 - options.draft_k:
                x = x.detach()
            penalty = penalty + (divergence(x, step) / options.draft_k if kl and step in chosen else 0.0)
            x = move(x, step)
        total = reward(x)
    (kl * penalty - total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], *, rtol: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found[name].double(), gradient.double(), rtol=rtol, atol=rtol * largest, msg=name)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "make_process"), [("draft-1", vp), ("draft-3", flow), ("draft-lv", vp), ("refl", flow), ("refl", vp)]
)
def test_the_gradient_is_that_of_autograd_through_all_steps(name: str, make_process: Any) -> None:
    """Each process with a step to the next noise level, to the clean clip, and a prediction of it."""
    model = network(dropout=0.3)  # which is off
    method = make_refl(model, make_process, **KINDS[name])
    wanted = expected(method, model.eval())
    # In smaller micro-batches, as after an OOM, with a filled-up one; and with a loss that is scaled, as for fp16.
    found, loss = first_step(method, model, pieces=3, scale=2.0**12)
    close(found, wanted)
    compare_with_record(f"{name} {make_process.__name__}", [picture(found.values(), loss)])
    ranks = [make_refl(model, make_process, **KINDS[name], parallel=Half(rank, 2), batch_size=2) for rank in range(2)]
    halves = [gradients(rank, model) for rank in ranks]
    close({key: (halves[0][key] + halves[1][key]) / 2 for key in halves[0]}, wanted)


class Half(OneOf):
    """A rank whose neighbor's scores are its own."""

    def gather_objects(self, items: list[Any]) -> list[Any]:
        return [(number + 100 * rank, scores) for rank in range(self.world_size) for number, scores in items]


def test_the_penalty_holds_the_trained_steps_close_to_the_reference_model() -> None:
    model = network(cls=Adapted)
    method = make_refl(model, draft_k=2, kl_coef=0.5)
    wanted = expected(method, model, kl=0.5)
    close(gradients(method, model), wanted)
    assert gradients(make_refl(model, draft_k=2), model).keys() == wanted.keys()


def test_an_attempt_that_ran_out_of_memory_leaves_nothing_behind() -> None:
    """The step is repeated from its first micro-batch, in pieces."""
    model = network()
    method = make_refl(model, draft_k=3)
    step = next(method.steps(0, model))
    for number, batch in enumerate(step):
        method.loss(model, batch)[0].backward()
        if number == 1:
            break
    next(iter(step))  # made, and lost before its backward pass
    model.zero_grad()
    for batch in step.split([2] * len(step)):
        method.loss(model, batch)[0].backward()
    close({name: p.grad for name, p in model.named_parameters()}, expected(method, model))


def test_the_loss_is_the_reward_and_a_dry_run_changes_nothing() -> None:
    model = network()
    method = make_refl(model, draft_k=2, reward=["policies:signed_brightness=2", "policies:contrast_in_percent=0"])
    wanted = gradients(method, model)
    ((_, dry),) = method.dry_steps(model)
    for batch in dry:
        method.loss(model, batch)[0].backward()
    model.zero_grad()
    step = next(method.steps(0, model))
    loss = 0.0
    for batch in step:
        found, metrics = method.loss(model, batch)
        found.backward()
        loss += float(metrics["loss"])
    model.zero_grad()
    assert loss == pytest.approx(-2 * step.metrics["reward/policies:signed_brightness"], rel=1e-5)
    assert step.metrics["reward/policies:contrast_in_percent"] > 0
    assert step.metrics["reward_gradient"] > 0
    close(gradients(make_refl(model, draft_k=2, reward=method.section.reward), model), wanted, rtol=1e-6)


def test_some_frames_are_scored_alone() -> None:
    """Of two latent frames, the one that is drawn has a gradient."""
    model = network()
    method = make_refl(model, reward_frames=1)
    collected = method.collect(model, 0)
    (frames,) = {tuple((adjoint != 0).flatten(2).any(2).any(0).tolist()) for adjoint in collected.adjoints.values()}
    assert sorted(frames) == [False, True]
    assert {method._frames(rollout, 2).start for rollout in range(20)} == {0, 1}


def test_rewards_rise() -> None:
    """The reward's sign depends on the prompt, so that no drift earns anything; each rollout trains another step."""
    model = network()
    method = make_refl(model, **KINDS["refl"], num_generations=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    rewards = []
    for step in islice(method.steps(0, model), 12):
        for batch in step:
            method.loss(model, batch)[0].backward()
        rewards.append(step.metrics["reward/policies:signed_brightness"])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3 > 0.15
