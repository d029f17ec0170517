"""Without replay: the gradient is that of replay for every kind of advantage, and no more is stored than is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_of import OneOf
from policies import Adapted, Network, flow, make_grpo, network, vp
from torch import Tensor

from finetrainers.config.load import load_config
from finetrainers.methods.grpo.no_replay.gradient_plan import GradientPlan, plan_gradients
from finetrainers.methods.grpo.no_replay.group_gradients import GroupGradients
from finetrainers.methods.grpo.no_replay.no_replay import RolloutGradients
from finetrainers.rewards.reward_set import RewardSet

TWO = ["policies:signed_brightness", "policies:contrast_in_percent=0.5"]
OPPOSED = ["policies:signed_brightness", "policies:contrast_in_percent=-0.5"]
#: Options, and what is stored: its kind, of a prompt at most, and whether it is summed up when the prompt is done.
CASES: list[tuple[dict[str, Any], tuple[str, int, bool]]] = [
    ({}, ("sums", 2, True)),
    ({"best_of_n": 4}, ("extremes", 4, True)),
    ({"best_of_n": 6, "offload_trajectory": True}, ("extremes", 6, True)),
    ({"advantage_correction": 1, "ratio_norm": True, "step_weight": "flash"}, ("sums", 2, True)),
    ({"advantage": "global_std"}, ("clips", 8, False)),
    ({"advantage": "mean_only", "best_of_n": 4}, ("clips", 8, True)),
    ({"advantage_clip": 1.0, "best_of_n": 4}, ("clips", 8, True)),  # some advantages are clipped
    ({"reward": TWO}, ("sums", 3, True)),
    ({"reward": TWO, "best_of_n": 4, "reward_combination": "weighted"}, ("extremes", 4, True)),
    ({"reward": OPPOSED, "best_of_n": 4, "reward_combination": "separate"}, ("clips", 8, True)),
    ({"reward": TWO, "reward_combination": "gdpo"}, ("clips", 8, False)),
    ({"reward": ["policies:bright_only"], "prompts_per_step": 4}, ("sums", 2, True)),
    ({"batch_size": 16, "window_per_prompt": True, "timestep_fraction": 0.5, "window_size": 4}, ("sums", 2, True)),
    ({"rollout_cfg": 2.0, "trajectory_dtype": "bf16", "init_same_noise": False}, ("sums", 2, True)),
]


def gradient(*process: Any, cls: type[Network] = Network, parallel: Any = None, **options: Any) -> tuple[Any, ...]:
    """Of the first update the gradient, the step's metrics and the method."""
    model = network(cls=cls, dropout=0.5) if cls is Network else network(cls=cls)
    method = make_grpo(*process, parallel=parallel, **options)
    step = next(method.steps(0, model.train()))
    sums: dict[str, float] = {}
    for batch in step:
        loss, metrics = method.loss(model, batch)
        loss.backward()
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, {**step.metrics, **sums}, method


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """But for fp32 rounding."""
    assert found.keys() == expected.keys()
    whole, wanted = (torch.cat([g.flatten().double() for g in one.values()]) for one in (found, expected))
    assert (whole - wanted).norm() <= 2e-6 * wanted.norm()
    assert wanted.norm() > 0


@pytest.mark.rotating
@pytest.mark.parametrize(("options", "plan"), CASES, ids=str)
def test_the_gradient_is_that_of_replay(
    options: dict[str, Any], plan: tuple[str, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_process, options = vp if len(options) % 2 else flow, {"prompts_per_step": 2, **options}
    stored: list[int] = []
    scored = RolloutGradients._sum_up

    def watched(self: RolloutGradients, *arguments: Any) -> None:
        groups = [*(self._retained if self.plan.retains else self._stored).values()]
        stored.append(sum(len(group.stored) for group in groups) + len(self._total) * (not self.plan.retains))
        assert (self._storage_device == torch.device("cpu")) == options.get("offload_trajectory", False)
        scored(self, *arguments)

    monkeypatch.setattr(RolloutGradients, "_sum_up", watched)
    replayed, expected, _ = gradient(make_process, **options)
    for how in ("reweight", "retain"):
        taken, found, method = gradient(make_process, rollout_gradients=how, **options)
        assert_equal(taken, replayed)
        planned = method.collector._gradients
        assert planned is not None
        clips = 8 * options["prompts_per_step"]
        if how == "reweight":
            assert (planned.stored, planned.max_stored, planned.early) == plan
            assert max(stored) == planned.peak(clips, 1)
        else:  # graphs cannot be summed up
            assert (planned.stored, planned.max_stored, planned.early) == (
                plan if plan[0] != "sums" else ("clips", 8, plan[2])
            )
            batch = options.get("batch_size", 4)
            assert max(stored) == planned.clips_with_graphs(clips, 1, batch=batch)[1]
        stored.clear()
        for name in {*found, "loss"} - {name for name in found if name.startswith("seconds")}:
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_only_the_adapter_has_gradients() -> None:
    replayed, *others = (gradient(cls=Adapted, rollout_gradients=how)[0] for how in ("replay", "reweight", "retain"))
    for taken in others:
        assert_equal(taken, replayed)
        assert all("adapter" in name for name in taken)


def test_clips_that_failed_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    score = RewardSet.score

    def failing(self: RewardSet, videos: Tensor, *arguments: Any, **options: Any) -> Any:
        found = score(self, videos, *arguments, **options)
        lost = torch.arange(len(videos)) == 1
        for head in found.heads.values():
            head.normalized.masked_fill_(lost, float("nan"))
        return type(found)(found.heads, found.failed | lost)

    monkeypatch.setattr(RewardSet, "score", failing)
    for options, trained in (({}, 24), ({"best_of_n": 4}, 16)):
        (replayed, metrics, _), *others = (
            gradient(rollout_gradients=how, reward_on_error="mask", **options)
            for how in ("replay", "reweight", "retain")
        )
        assert metrics["clips_trained"] == trained  # of 32, of which 8 are lost
        for taken, *_ in others:
            assert_equal(taken, replayed)


@pytest.mark.parametrize("how", ["reweight", "retain"])
def test_a_rollout_without_any_signal_makes_an_empty_step(how: str) -> None:
    method = make_grpo(reward=["policies:constant"], rollout_gradients=how)
    step = next(method.steps(0, network()))
    assert len(step) == 0
    assert step.metrics["updates_skipped"] == 1


@pytest.mark.parametrize(
    ("options", "how", "sharing", "together"),
    [
        ({}, "reweight", 1, False),
        ({"best_of_n": 2}, "reweight", 2, False),
        ({"advantage": "global_std"}, "reweight", 1, False),
        ({}, "retain", 1, True),
        ({"best_of_n": 2}, "retain", 1, False),
        ({"best_of_n": 2}, "retain", 1, True),
        ({"best_of_n": 4}, "retain", 2, False),
    ],
)
def test_a_prompts_clips_may_be_on_several_ranks(
    options: dict[str, Any], how: str, sharing: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two ranks has half of a prompt's clips. What the other one scored, it is told when all are scored.

    Processes that share clips have the same scores and gradients. Where processes wait for each other, all go backward
    equally often, whichever has more clips that are trained.
    """
    told: dict[int, Any] = {}
    passes: dict[int, int] = {}  # that each rank would make by itself
    made: list[int] = []

    class Rank(OneOf):
        forward_is_collective = together

        def gather_objects(self, items: list[Any]) -> list[Any]:
            if isinstance(items[0], int):
                [passes[self.rank]] = items
                return [*passes.values()]
            told[self.rank] = items
            if len(told) < self.world_size:
                raise InterruptedError
            return [one for rank in sorted(told) for one in told[rank]]

    backward = RolloutGradients._backward

    def watched(self: RolloutGradients, *arguments: Any, **options: Any) -> Any:
        made[-1] += 1
        return backward(self, *arguments, **options)

    def taken(rank: Rank) -> Any:
        made.append(0)
        return gradient(parallel=rank, rollout_gradients=how, **options)[0]

    monkeypatch.setattr(RolloutGradients, "_backward", watched)
    options = {**options, "prompts_per_step": 1, "batch_size": 2, "clip_range": 1e-3}
    ranks = [Rank(rank, 2 * sharing, sharing=sharing) for rank in range(2 * sharing)]
    for rank in ranks[1:]:
        with pytest.raises(InterruptedError):
            taken(rank)
    for _ in range(2 if together else 1):  # at first, a rank does not know how many passes the others make
        found = [taken(rank) for rank in ranks]
    both = found[::sharing]
    assert all(torch.equal(found[-1][name], gradient) for name, gradient in both[1].items())
    if together:
        assert made[-2:] == [max(passes.values())] * 2
        assert "best_of_n" not in options or passes[0] != passes[1]
    replayed = gradient(**options)[0]
    assert_equal({name: (both[0][name] + both[1][name]) / 2 for name in both[0]}, replayed)


def test_processes_that_wait_for_each_other_all_go_back_through_a_step() -> None:
    """Of two prompts with other steps, a rank of which each has one."""

    class Together(OneOf):
        forward_is_collective = True

    options = {"window_per_prompt": True, "window_size": 1, "prompts_per_step": 2, "num_generations": 4}
    method = make_grpo(parallel=Together(0, 2), rollout_gradients="reweight", **options)
    tables = method.sampler.tables
    rollout = next(r for r in range(20) if tables.trained(r, 0) != tables.trained(r, 1))
    wanted = {*tables.trained(rollout, 0), *tables.trained(rollout, 1)}
    assert method.collector._batch_steps(rollout, 0) == wanted
    alone = make_grpo(parallel=OneOf(0, 2), rollout_gradients="reweight", **options)
    assert alone.collector._batch_steps(rollout, 0) == set(tables.trained(rollout, 0))


@pytest.mark.parametrize(("how", "waiting", "gradients"), [("retain", (15, 7), 0), ("reweight", (0, 0), 8)])
def test_a_dry_step_has_what_waits_in_a_rollout(how: str, waiting: tuple[int, int], gradients: int) -> None:
    """Of 8 clips the 4 best and worst, and the batch of 4 that is sampled, with two steps each."""
    model, calls = network(), [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    model.register_forward_pre_hook(count)
    method = make_grpo(rollout_gradients=how, best_of_n=4, prompts_per_step=1)
    waits = method.collector.waits
    assert waits is not None
    assert (waits.waiting_calls, waits.gradients) == (waiting, gradients)
    [(_, step)] = method.dry_steps(model)
    for batch in step:
        loss, _ = method.loss(model, batch)
        assert len(batch.before) == 1  # type: ignore[union-attr]
        loss.backward()
    assert calls[0] == (waiting[0] + 1 if waiting[0] else 0) + 1
    assert any(p.grad is not None for p in model.parameters())


# ---- what is stored ------------------------------------------------------------------------------------------------


def ones(factor: float) -> list[Tensor]:
    return [torch.full((2,), float(factor)), torch.full((1,), 2.0 * factor)]


def test_scores_far_from_zero_and_close_together_lose_nothing() -> None:
    """Sums of scores themselves would, in fp32: their spread is the 2e-5th part of their mean."""
    generator = torch.Generator().manual_seed(0)
    scores = [5000 + 0.1 * i for i in range(8)]
    gradients = [torch.randn(1000, generator=generator) for _ in scores]
    group = GroupGradients(GradientPlan("sums", 2, True, 8), 8)
    for clip, (one, score) in enumerate(zip(gradients, scores, strict=True)):
        group.add(clip, [one.clone()], (score,))
    mean = sum(scores) / 8
    factors = {clip: (score - mean) / 0.23 for clip, score in enumerate(scores)}
    expected = sum(factors[clip] * one.double() for clip, one in enumerate(gradients))
    found = group.pop_combined(factors)
    assert found is not None
    assert (found[0] - expected).norm() <= 1e-6 * expected.norm()  # type: ignore[union-attr]


def test_of_extremes_a_clip_that_has_fallen_out_is_gone() -> None:
    group = GroupGradients(GradientPlan("extremes", 2, True, 5), 5)
    for clip, score in enumerate([3.0, 1.0, 2.0, 3.0, 1.0]):
        group.add(clip, ones(clip), (score,))
        assert len(group.stored) <= 2
    assert sorted(group.stored) == [1, 3]  # among equal ones the first is the worse
    found = group.pop_combined({1: -1.0, 3: 2.0})
    assert found is not None
    assert [one.tolist() for one in found] == [[5.0, 5.0], [10.0]]
    with pytest.raises(ValueError, match=r"clips \[0\]"):
        group.pop_combined({0: 1.0})


def test_advantages_that_do_not_follow_the_scores_are_an_error() -> None:
    group = GroupGradients(GradientPlan("sums", 2, True, 4), 4)
    for clip in range(4):
        group.add(clip, ones(clip), (float(clip),))
    with pytest.raises(ValueError, match=r"advantages .* by [0-9]"):
        group.pop_combined({0: -1.0, 1: -1.0, 2: 1.0, 3: 1.0})


@pytest.mark.parametrize(
    ("options", "share", "processes", "expected"),
    [
        ({}, 32, 1, 3),  # two sums of a prompt, and one gradient of all earlier ones
        ({"prompts_per_step": 1}, 8, 1, 2),
        ({"best_of_n": 4}, 32, 1, 5),
        ({"advantage": "global_std"}, 32, 1, 32),
        ({"prompts_per_step": 1}, 2, 4, 2),
        ({"prompts_per_step": 1, "num_generations": 24, "best_of_n": 8}, 24, 1, 8),
        ({"prompts_per_step": 3}, 12, 2, 4),  # a whole prompt and half of one, in either order
        ({"num_generations": 28}, 112, 1, 29),  # one of 28 may be more than 5 deviations from the mean
        ({"sp_size": 2}, 32, 1, 32),
    ],
)
def test_planned_gradients(options: dict[str, Any], share: int, processes: int, expected: int) -> None:
    config = load_config(**{
        "model_name": "m", "pretrained_model_name_or_path": "repo", "method": "grpo", "prompts": "p.txt",
        "reward": ["brightness"], "rollout_size": "17x64x64", "train_steps": 4, **options,
    })  # fmt: skip
    assert plan_gradients(config).peak(share, processes) == expected
