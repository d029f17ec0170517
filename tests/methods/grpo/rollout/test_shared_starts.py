"""Clips of a prompt are sampled and trained as one until they differ: the gradient of plain replay in fewer passes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from one_of import OneOf
from policies import Adapted, Network, flow, make_grpo, make_parts, network, vp
from torch import Tensor, nn

from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.registry import method_spec

#: Options, and the passes of an update per prompt of 8 clips with sharing and without it, a trained one counting 3. All
#: windows begin at the fourth of eight steps.
LATE = {"window_range": [0.4, 0.9], "window_strategy": "fixed"}
CASES: list[tuple[dict[str, Any], int, int]] = [
    ({"window_size": 1, "kl_coef": 0.1, "batch_size": 16}, 4 + 32 + 3 + 1, 64 + 24 + 8),
    ({"window_size": 1}, 4 + 32 + 3, 64 + 24),
    ({"window_size": 2}, 4 + 32 + 3 + 24, 64 + 48),
    ({"window_size": 2, "best_of_n": 4, "batch_size": 8}, 4 + 32 + 3 + 12, 64 + 24),
    ({"window_size": 2, "rollout_cfg": 2.0, "trajectory_dtype": "bf16"}, 2 * (4 + 32 + 3 + 24), 2 * (64 + 48)),
    ({"window_size": 2, "ratio_norm": True, "step_weight": "flash", "batch_size": 2}, 4 + 32 + 3 + 24, 64 + 48),
    ({"window_size": 0, "window_range": None, "window_strategy": None}, 1 + 56 + 3 + 6 * 24, 64 + 7 * 24),
    ({"window_size": 1, "init_same_noise": False}, 64 + 24, 64 + 24),
]


class Passes:
    """Clips that go through a network: of all calls, three times those with a gradient, and of each call."""

    def __init__(self, model: nn.Module) -> None:
        self.total, self.calls = 0, list[int]()
        model.register_forward_pre_hook(self)

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.calls.append(len(inputs[0]))
        self.total += len(inputs[0]) * (3 if torch.is_grad_enabled() else 1)


def updates(
    *process: Any, shares: bool, count: int = 1, cls: type[Network] = Network, parallel: Any = None, **options: Any
) -> tuple[list[Tensor], list[dict[str, float]], Passes, GRPO]:
    """Return the gradients and metrics of the first updates of a policy that does not change, and its passes."""
    model = network(cls=cls)
    method = make_grpo(*process, model=model, parallel=parallel, **options)
    if not shares:
        method.load_state_dict({})  # as an earlier version has saved it
    passes, gradients, metrics = Passes(model), [], []
    for step in islice(method.steps(0, model.train()), count):
        sums: dict[str, float] = {}
        for batch in step:
            loss, values = method.loss(model, batch)
            loss.backward()
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]))
        metrics.append({**step.metrics, **sums})
        model.zero_grad()
    return gradients, metrics, passes, method


def assert_shared(found: Any, expected: Any) -> None:
    """Compare gradients and metrics with those of plain replay; policies that agree have ratios of exactly 1."""
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm() > 0
    for now, then in zip(found[1], expected[1], strict=True):
        assert now["ratio_error"] == 0.0
        for name in {*now, *then} - {name for name in now if name.startswith("seconds/")}:
            assert now[name] == pytest.approx(then[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("options", "shared", "plain"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.rotating) for case in CASES[1:])],
    ids=str,
)
def test_the_update_is_that_of_plain_replay_in_fewer_passes(options: dict[str, Any], shared: int, plain: int) -> None:
    process, options = (flow, vp)[len(options) % 2], {**LATE, "prompts_per_step": 2, **options}
    cls = Adapted if "kl_coef" in options else Network
    found, expected = (updates(process, shares=shares, cls=cls, **options) for shares in (True, False))
    assert_shared(found, expected)
    assert (found[2].total, expected[2].total) == (2 * shared, 2 * plain)
    branches = 2 if "rollout_cfg" in options else 1
    assert max(found[2].calls) <= branches * found[3].collector.batch_size
    assert ("shares_starts" in found[3].state_dict()) == options.get("init_same_noise", True)
    assert "shares_starts" not in expected[3].state_dict()


def test_windows_of_prompts_and_updates_of_a_rollout() -> None:
    """Prompts of a batch begin to differ at other steps; not all are trained at the first; two updates share them."""
    options = {"window_per_prompt": True, "window_size": 2, "timestep_fraction": 0.5, "batch_size": 16}
    found, expected = (updates(shares=shares, count=2, updates_per_rollout=2, **options) for shares in (True, False))
    assert_shared(found, expected)
    assert found[2].total < expected[2].total
    shared = found[3].rollout(network().eval(), 0).shared
    assert shared is not None
    assert None in shared.by_rank[0]
    assert {*shared.by_rank[0]} - {None}


class Unheard(Exception):
    """Another rank has not said anything yet."""


@pytest.mark.rotating
@pytest.mark.parametrize("collective", [True, False])
def test_ranks_call_the_network_equally_often(collective: bool) -> None:
    """Of three prompts' twelve clips, four ranks have clips of one or two prompts, and some train none of them."""
    told: dict[int, list[Any]] = {}

    class Rank(OneOf):
        forward_is_collective = collective

        def gather_objects(self, items: list[Any]) -> list[Any]:
            told[self.rank] = items
            if len(told) < self.world_size:
                raise Unheard
            return [item for rank in sorted(told) for item in told[rank]]

    options = {
        "prompts_per_step": 3, "num_generations": 4, "batch_size": 3, "best_of_n": 2, "window_per_prompt": True,
        "window_size": 2, "reward": ["policies:bright_only"],
    }  # fmt: skip
    ranks = [Rank(rank, 4) for rank in range(4)]
    for rank in ranks[:-1]:
        with pytest.raises(Unheard):
            updates(shares=True, parallel=rank, **options)
    found = [updates(shares=True, parallel=rank, **options) for rank in ranks[::-1]]
    alone = updates(shares=True, **options)
    mean = torch.stack([gradients[0] for gradients, *_ in found]).mean(0)
    assert (mean - alone[0][0]).norm() <= 2e-6 * alone[0][0].norm() > 0
    calls = [passes.calls for _, _, passes, _ in found]
    assert {len(each) for each in calls} == {len(calls[0])} or not collective
    assert all(metrics[0]["ratio_error"] == 0.0 for _, metrics, *_ in found)
    trained = [len(method.rollout(network().eval(), 0).trained_clips) for _, _, _, method in found]
    assert len(set(trained)) > 1
    assert calls != [calls[0]] * 4 or collective


def test_a_run_of_an_earlier_version_is_told_that_it_shares_nothing() -> None:
    def warnings(saved: dict[str, Any], **options: Any) -> list[str]:
        config = make_parts(**options).config
        return [*method_spec(config).resume_warnings(config, saved)]

    assert len(warnings({})) == 1
    assert warnings(make_grpo().state_dict()) == warnings({}, init_same_noise=False) == []


def test_a_dry_run_goes_through_the_largest_of_each_kind() -> None:
    """Of 16 clips, an update has two of each prompt's four best and worst, and a call two inputs or two clips."""
    model = network()
    method = make_grpo(batch_size=2, prompts_per_step=4, num_generations=4, best_of_n=4, updates_per_rollout=2)
    passes, sizes = Passes(model), []
    for _, step in method.dry_steps(model):
        [batch] = step
        method.loss(model, batch)[0].backward()
        sizes.append((len(batch.before), len(batch.after)))
    assert sizes == [(2, 4), (2, 2)]
    assert passes.calls == [2, 2]
