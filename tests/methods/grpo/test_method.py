"""The policy gradient against its definition: exact ratios, REINFORCE's gradient, shares, best-of-n, world sizes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import weakref
from typing import Any

import pytest
import torch
from one_of import OneOf
from policies import flow, make_collector, make_grpo, network, vp
from refusals import refused
from torch import Tensor, nn

from finetrainers.diffusion.policy import log_density, transition_mean
from finetrainers.methods.grpo.method import GRPO, Transition

KERNELS = [("flow", 0.7), ("dance", 0.25), ("cps", 0.5), ("ddim", 0.5)]


def grpo(*process: Any, **options: Any) -> GRPO:
    return make_grpo(*process, **{"clip_range": 1e-3, **options})


def first_update(method: GRPO, model: nn.Module) -> list[Transition]:
    return list(next(method.steps(0, model)))


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("make_process", [flow, vp])
@pytest.mark.parametrize(("kernel", "eta"), KERNELS)
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_on_policy_ratios_are_exactly_one(make_process: Any, kernel: str, eta: float, storage: str) -> None:
    model = network(dropout=0.5).train()
    method = grpo(make_process, sampler=kernel, eta=eta, trajectory_dtype=storage, best_of_n=4)
    for batch in first_update(method, model):
        model.train()  # as a sample between two updates leaves it
        _, metrics = method.loss(model, batch)
        assert metrics["ratio"].item() == pytest.approx(batch.share.sum().item(), rel=1e-6)
        assert metrics.get("ratio_error", torch.tensor(0.0)).item() == 0.0
        _, mean = method._mean(model, batch)
        assert torch.equal(log_density(batch.after, mean, batch.step.std), batch.log_old)


@pytest.mark.parametrize("make_process", [flow, vp])
def test_the_gradient_is_that_of_reinforce(make_process: Any) -> None:
    model = network()
    method = grpo(make_process, sampler="ddim", eta=0.5)
    batches = first_update(method, model)
    found = gradient(model, sum(method.loss(model, batch)[0] for batch in batches))
    clips = 4 * 8 * 2  # prompts x generations x trained steps

    def log_likelihood(batch: Transition) -> Tensor:
        prediction = method.sampler.predict(model, batch.before, batch.time, batch.conditions)
        inputs = map(batch.by_clip, (prediction, batch.before, batch.time))
        mean = transition_mean(method.sampler.process, *inputs, batch.step)
        density = torch.distributions.Normal(mean, batch.step.std.view(-1, 1, 1, 1, 1)).log_prob(batch.after)
        return (batch.advantage.sum(1) * density.flatten(1).mean(1)).sum()

    expected = gradient(model, -sum(log_likelihood(batch) for batch in batches) / clips)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_shares_make_a_mean_however_the_work_is_cut() -> None:
    model = network()
    whole = grpo(batch_size=8)
    parts = grpo(batch_size=2)
    gradients = [
        gradient(model, sum(m.loss(model, batch)[0] for batch in first_update(m, model))) for m in (whole, parts)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    for method in (whole, parts):
        total = sum(batch.share.sum().item() for batch in first_update(method, model))
        assert total == pytest.approx(1.0)


def test_several_updates_share_a_rollouts_clips() -> None:
    model = network()
    method = grpo(updates_per_rollout=2)
    first, second = itertools.islice(method.steps(0, model), 2)
    assert len(first) == len(second)
    assert sum(batch.share.sum().item() for batch in second) == pytest.approx(1.0)
    seen = [batch.after.double().sum().item() for batch in (*first, *second)]
    assert len(set(seen)) == len(seen) == 2 * (1 + 4)  # the first trained step, of 4 inputs, and the second of 16 clips
    assert [batch.is_first for batch in (*first, *second)].count(True) == 2
    with refused("invalid", "step 1 ", " 2 steps"):
        next(method.steps(1, model))


def test_clipping_stops_the_gradient_of_what_has_gone_far_enough() -> None:
    model = network()
    method = grpo(clip_range=1e-3)
    batch = first_update(method, model)[0]
    for change, sign in ((-0.01, 1.0), (0.01, -1.0)):  # the old policy thought less of it, or more
        moved = {
            **batch.__dict__,
            "log_old": batch.log_old + change,
            "advantage": torch.full_like(batch.advantage, sign),
        }
        loss, metrics = method.loss(model, Transition(**moved))
        assert gradient(model, loss).abs().max() == 0
        clipped = metrics["clipped_high"] + metrics["clipped_low"]
        assert clipped.item() == pytest.approx(batch.share.sum().item())
        reverse = Transition(**{**moved, "advantage": torch.full_like(batch.advantage, -sign)})
        assert gradient(model, method.loss(model, reverse)[0]).abs().max() > 0


def test_groups_that_teach_nothing_are_left_out_and_counted() -> None:
    model = network()
    method = grpo(reward=["policies:bright_only"])
    step = next(method.steps(0, model))
    assert step.metrics["constant_groups"] == 0.5
    assert step.metrics["clips_trained"] == 16
    assert step.metrics["updates_skipped"] == 0
    assert sum(int((batch.share > 0).sum()) for batch in step) == 16 * 2


def test_a_rollout_without_any_signal_makes_empty_steps() -> None:
    model = network()
    method = grpo(reward=["policies:constant"], updates_per_rollout=2)
    for step in itertools.islice(method.steps(0, model), 2):
        assert len(step) == 0
        assert step.metrics["updates_skipped"] == 1
        assert step.metrics["reward/policies:constant"] == pytest.approx(0.1)


def test_micro_batches_are_made_when_they_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    method = grpo()
    made: list[int] = []
    make = method.micro_batch
    monkeypatch.setattr(method, "micro_batch", lambda *a: made.append(a[-1].repeat) or make(*a))
    step = next(method.steps(0, model))
    assert len(step) == 9  # of inputs that clips share, and of clips
    assert made == []
    seen = []
    for batch in step:
        seen.append(len(made))
        reference = weakref.ref(batch)
        del batch
        assert reference() is None  # nobody else holds it
    assert seen == list(range(1, 10))
    assert step.metrics["seconds/train"] > 0


def test_clips_that_are_not_trained_are_dropped_with_their_memory() -> None:
    collected = make_collector(best_of_n=2).collect(network().eval(), 0)
    assert list(collected.latents) == list(collected.replays) == list(collected.trained_clips)
    assert len(collected.trained_clips) == 4 * 2
    for tensor in (*collected.latents.values(), *(r.before for r in collected.replays.values())):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_one_rollout_is_gone_before_the_next_is_made() -> None:
    model = network()
    method = grpo()
    living: list[weakref.ref[Any]] = []
    collect = method.collector.collect

    def watch(*args: Any) -> Any:
        assert not living or living[-1]() is None
        found = collect(*args)
        living.append(weakref.ref(found))
        return found

    method.collector.collect = watch  # type: ignore[method-assign]
    for step in itertools.islice(method.steps(0, model), 3):
        list(step)
        del step
    assert len(living) == 3


class WaitingError(Exception):
    """Another rank has not said anything yet."""


class Rank(OneOf):
    """One of several ranks that run one after the other; what the others said is kept."""

    def __init__(self, rank: int, said: list[list[Any] | None], *, sharing: int) -> None:
        super().__init__(rank, len(said), sharing=sharing)
        self.said = said

    def gather_objects(self, items: list[Any]) -> list[Any]:
        self.said[self.rank] = items
        if None in self.said:
            raise WaitingError
        return [item for part in self.said for item in part or ()]


@pytest.mark.parametrize("sharing", [1, 2])
def test_two_data_ranks_are_one(sharing: int) -> None:
    """Each rank may also be two processes that share their clips: each scores a half, and gradients count once."""
    model = network()
    alone = grpo()
    batches = first_update(alone, model)
    expected = gradient(model, sum(alone.loss(model, batch)[0] for batch in batches))
    ranks = range(2 * sharing)
    said: list[list[Any] | None] = [None for _ in ranks]
    for rank in ranks:  # the first pass only fills in what each says
        with contextlib.suppress(WaitingError):
            make_collector(parallel=Rank(rank, said, sharing=sharing)).collect(model.eval(), 0)
    assert sum(len(scores.failed) for part in said for _, scores in part or ()) == 32  # each clip once
    total: Any = 0
    stats = []
    for rank in ranks:
        method = grpo(parallel=Rank(rank, said, sharing=sharing))
        step = next(method.steps(0, model))
        total = total + gradient(model, sum(method.loss(model, batch)[0] for batch in step))
        stats.append({k: v for k, v in step.metrics.items() if not k.startswith("seconds")})
    torch.testing.assert_close(total / len(ranks), expected, rtol=1e-4, atol=1e-7)
    assert all(found == stats[0] for found in stats)


def test_guidance_calls_both_branches_and_stays_exact() -> None:
    model = network()
    method = grpo(rollout_cfg=3.0)
    batch = first_update(method, model)[0]
    with_prompt, without = (
        method.sampler.spec.predict(
            model,
            batch.before,
            batch.time,
            batch.conditions.rows(rows),
            None,  # type: ignore[arg-type]
        )
        for rows in (slice(0, 4), slice(4, 8))
    )
    found = method.sampler.predict(model, batch.before, batch.time, batch.conditions)
    torch.testing.assert_close(found, without + 3 * (with_prompt - without))
    _, metrics = method.loss(model, batch)
    assert metrics["ratio_error"] == 0


def test_a_policy_that_is_not_the_one_that_sampled_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    method = grpo()
    batch = first_update(method, model)[0]
    with caplog.at_level(logging.WARNING):
        method.loss(model, batch)
    assert not caplog.records
    with torch.no_grad():
        model.outward.bias += 0.3
    with caplog.at_level(logging.WARNING):
        _, metrics = method.loss(model, batch)
        method.look()
    assert metrics["ratio_error"] > 1e-3
    [message] = caplog.messages
    assert float(re.findall(r"\d\.\d+(?:e-\d+)?", message)[0]) == pytest.approx(float(metrics["ratio_error"]), rel=0.05)
    assert "--attn_backend" not in message
    method.sampler.device = torch.device("cuda")
    method.look()
    assert "--attn_backend _native_flash" in caplog.messages[-1]


def test_ratio_normalization_centres_the_ratio() -> None:
    """GRPO-Guard: for a mean moved independently of the noise, log-ratios drift below zero; corrected ones do not."""
    model = network()
    method = grpo(sampler="dance", eta=0.25, ratio_norm=True)
    plain = grpo(sampler="dance", eta=0.25)
    batches = first_update(method, model)
    _, metrics = method.loss(model, batches[0])
    assert metrics["ratio_error"] == 0
    with torch.no_grad():
        model.outward.bias += torch.tensor([0.5, -0.5, 0.5, -0.5])
    drift = [sum(m.loss(model, b)[1]["ratio"].item() for b in batches) - 1 for m in (method, plain)]
    assert drift[1] < -0.005
    assert abs(drift[0]) < abs(drift[1]) / 20


def test_noise_is_a_function_of_the_clip_alone() -> None:
    model = network().eval()
    small, large = make_collector(batch_size=4), make_collector(batch_size=8)
    found = [collector.collect(model, 3) for collector in (small, large)]
    for i, latents in found[0].latents.items():
        torch.testing.assert_close(latents, found[1].latents[i], rtol=1e-4, atol=1e-5)
    again = make_collector(batch_size=4).collect(model, 3)
    assert all(torch.equal(latents, again.latents[i]) for i, latents in found[0].latents.items())
    other = small.collect(model, 4)
    assert not any(torch.equal(latents, other.latents[i]) for i, latents in found[0].latents.items())


def test_a_shared_start_leaves_only_the_window_to_differ() -> None:
    model = network().eval()
    same = make_collector(window_size=1, window_range=[0.4, 0.6], window_strategy="fixed").collect(model, 0)
    first, *others = [same.replays[i] for i in range(8)]
    assert all(torch.equal(first.before, replay.before) for replay in others)
    assert not any(torch.equal(first.after, replay.after) for replay in others)
    apart = make_collector(
        init_same_noise=False, window_size=1, window_range=[0.4, 0.6], window_strategy="fixed"
    ).collect(model, 0)
    assert not any(torch.equal(apart.replays[0].before, apart.replays[i].before) for i in range(1, 8))


def test_work_that_does_not_divide_is_refused_with_the_sums() -> None:
    with refused("conflict", "4 prompts", "8 generations", "32 clips", "1 rank", " 5;", "--prompts_per_step"):
        make_collector(batch_size=5).jobs(0)
