"""Advantage Weighted Matching: what must hold of it whatever the reward; `test_preset_updates` has its formula."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from policies import flow, make_awm, network, vp

from finetrainers.methods.grpo.awm import AWM, matching_loss

SMALL = {"prompts_per_step": 2, "num_generations": 4, "batch_size": 4}


def run(method: AWM, model: Any, start: int, steps: int) -> list[dict[str, float]]:
    """Metrics of plain gradient steps."""
    records = []
    for step in islice(method.steps(start, model), steps):
        losses = []
        for batch in step:
            loss, metrics = method.loss(model, batch)
            loss.backward()
            losses.append(metrics)
        records.append({name: sum(float(metrics[name]) for metrics in losses) for name in losses[0]})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    return records


def test_matching_losses_are_those_of_the_paper() -> None:
    error, level = torch.tensor([0.5, 1.5, 0.0]), torch.tensor([0.2, 0.9, 0.5])
    torch.testing.assert_close(matching_loss(error, level, "uniform", 0.25), error)
    torch.testing.assert_close(matching_loss(error, level, "t", 0.25), level * error)
    torch.testing.assert_close(matching_loss(error, level, "t2", 0.25), level**2 * error)
    huber = 2 * level * (torch.sqrt(error + 1e-10) - 1e-5)
    torch.testing.assert_close(matching_loss(error, level, "ghuber", 0.5), huber)


@pytest.mark.parametrize("make_process", [flow, vp])
def test_ratios_begin_at_one_and_are_clipped_in_later_updates(make_process: Any) -> None:
    model = network(dropout=0.5)
    method = make_awm(model, make_process, updates_per_rollout=2, clip_range=1e-4, matching_loss="t", **SMALL)
    first, second, third = run(method, model, 0, 3)
    assert (first["ratio"], first["approx_kl"], first["moved"]) == (pytest.approx(1), 0.0, 0.0)
    assert first["clipped_high"] == first["clipped_low"] == 0.0
    assert 0 < second["clipped_high"] + second["clipped_low"] <= 1
    assert second["approx_kl"] > 0
    assert third["approx_kl"] == 0.0  # the next rollout, of another policy
    assert third["moved"] > 0  # from the EMA, which has not arrived there


def test_every_clip_is_trained_at_a_level_of_each_part_of_the_range() -> None:
    model = network()
    method = make_awm(model, noise_levels=3, noise_level_range=[0.125, 0.875])
    jobs = method.collector.jobs(0)
    draws = torch.tensor([method.levels(0, job) for job in jobs])
    assert torch.equal(draws.amin(0), torch.tensor([1, 3, 5]))  # of 8 steps
    assert torch.equal(draws.amax(0), torch.tensor([2, 4, 6]))
    assert len({tuple(row.tolist()) for row in draws}) == 8
    many = make_awm(model, noise_levels=20).levels(0, jobs[0])
    assert sorted(many) == many
    assert set(many) == set(range(8))


def test_resuming_at_a_rollout_changes_nothing() -> None:
    """Weights and their EMA, saved after the second step, go on as if nothing had been."""
    options = {**SMALL, "updates_per_rollout": 2, "old_policy_decay": [0, 0.3, 0.9]}
    straight, first, second = network(), network(), network(seed=1)
    run(make_awm(straight, **options), straight, 0, 4)
    method = make_awm(first, **options)
    run(method, first, 0, 2)
    saved = {name: tensor.clone() for name, tensor in method.state_dict()["old"].items()}
    resumed = make_awm(second, **options)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict({"old": saved})
    run(resumed, second, 2, 2)
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert make_awm(straight, old_policy_kl=0.0).state_dict() == {}
