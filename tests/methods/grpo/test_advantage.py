"""Advantages against numpy, in any order of the clips, at any world size; and which clips best-of-n keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch import Tensor

from finetrainers.config.grpo import GRPOSection
from finetrainers.methods.grpo.advantage import Advantages
from finetrainers.methods.grpo.advantage import best_of_n as best
from finetrainers.methods.grpo.advantage import compute_advantages as compute

MODES = ["group_std", "global_std", "mean_only"]
COMBINATIONS = ["sum", "separate", "weighted", "gdpo"]
SETTINGS = [(mode, combination) for mode in MODES for combination in COMBINATIONS]


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_rewards(prompts: int = 3, generations: int = 8) -> dict[str, Tensor]:
    return {"a": random(0, prompts, generations), "b": 40 + random(1, prompts, generations, scale=7.0)}


WEIGHTS = {"a": 1.0, "b": -0.25}


#: Arguments of tests, and the options that they stand for.
OPTIONS = {
    "mode": "advantage", "eps": "advantage_eps", "floor": "advantage_std_floor", "clip": "advantage_clip",
    "correction": "advantage_correction", "combination": "reward_combination",
}  # fmt: skip


def compute_advantages(
    scores: dict[str, Tensor], *, weights: dict[str, float], failed: Tensor | None = None, **options: Any
) -> Advantages:
    """Also with an `eps` of 0, which is no option, so that formulae hold exactly."""
    none = torch.zeros(next(iter(scores.values())).shape if scores else (1, 1), dtype=torch.bool)
    section = GRPOSection.model_construct(**{OPTIONS[name]: value for name, value in options.items()})
    return compute(scores, weights=weights, failed=none if failed is None else failed, section=section)


def best_of_n(advantages: Tensor, n: int, *, failed: Tensor | None = None) -> Tensor:
    return best(advantages, n, failed=torch.zeros_like(advantages, dtype=torch.bool) if failed is None else failed)


def one(scores: Tensor, **options: Any) -> Tensor:
    return compute_advantages({"a": scores}, weights={"a": 1.0}, **options).values


def reference(scores: np.ndarray, mode: str, eps: float, ddof: int = 0) -> np.ndarray:
    """One reward, `[P, G]`, as the formulae in the papers say."""
    centered = scores - scores.mean(axis=1, keepdims=True)
    if mode == "mean_only":
        return centered
    std = scores.std(axis=1, keepdims=True, ddof=ddof) if mode == "group_std" else scores.std(ddof=ddof)
    return centered / (std + eps)


# ---- one reward ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("correction", [0, 1])
def test_one_reward_is_that_of_the_formulae(mode: str, correction: int) -> None:
    scores = random(3, 4, 6) + 10 * random(4, 4, 1)
    found = one(scores, mode=mode, eps=1e-3, clip=math.inf, correction=correction)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, reference(scores.numpy(), mode, 1e-3, correction), rtol=1e-12, atol=1e-14)


def test_a_group_has_mean_zero_and_deviation_one() -> None:
    found = one(random(0, 5, 8, scale=300.0), eps=0.0)
    torch.testing.assert_close(found.mean(1), torch.zeros(5, dtype=torch.float64), atol=1e-14, rtol=0)
    torch.testing.assert_close(found.std(1, correction=0), torch.ones(5, dtype=torch.float64))


def test_dancegrpo_s_advantages_are_reproduced() -> None:
    """train_grpo_hunyuan.py: (r - group mean) / (torch.std of the group + 1e-8)."""
    scores = random(7, 2, 24).float()
    wanted = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-8)
    found = one(scores, eps=1e-8, correction=1)
    torch.testing.assert_close(found.float(), wanted)


def test_global_deviation_includes_how_prompts_differ() -> None:
    """Flow-GRPO: with prompts far apart, the rollout's deviation is that of the prompts' means."""
    scores = torch.tensor([[0.0, 2.0], [100.0, 102.0]])
    assert one(scores, mode="global_std", eps=0.0).tolist()[0] == pytest.approx(
        [-1 / math.sqrt(2501), 1 / math.sqrt(2501)]
    )


@pytest.mark.parametrize("mode", ["group_std", "global_std"])
@pytest.mark.parametrize(("factor", "shift"), [(3.0, 0.0), (1e-6, 5.0), (1e6, -1e3)])
def test_an_affine_change_of_the_reward_changes_nothing(mode: str, factor: float, shift: float) -> None:
    scores = random(2, 3, 8)
    torch.testing.assert_close(one(factor * scores + shift, mode=mode, eps=0.0), one(scores, mode=mode, eps=0.0))
    torch.testing.assert_close(one(-scores, mode=mode), -one(scores, mode=mode))


def test_a_shift_of_one_prompt_changes_nothing() -> None:
    scores = random(2, 3, 8)
    shifted = scores + torch.tensor([[0.0], [50.0], [-3.0]])
    for mode in ("group_std", "mean_only"):
        torch.testing.assert_close(one(shifted, mode=mode), one(scores, mode=mode))


def test_advantages_are_clipped() -> None:
    scores = torch.zeros(1, 64, dtype=torch.float64)
    scores[0, 5] = 1.0
    assert one(scores, clip=math.inf)[0, 5] > 7
    assert one(scores, clip=5.0)[0, 5] == 5.0
    assert one(-scores, clip=5.0)[0, 5] == -5.0


def test_small_deviations_are_held_up_by_the_floor() -> None:
    """Scores that differ by rounding must not become advantages of size one."""
    scores = 0.5 + torch.tensor([[0.0, 1e-7, -1e-7, 0.0]], dtype=torch.float64)
    assert one(scores, eps=0.0).abs().max() > 1
    assert one(scores, eps=0.0, floor=0.01).abs().max() < 1e-4
    spread = random(0, 1, 8)
    assert torch.equal(one(spread, floor=0.01), one(spread)), "a floor below the deviation changes nothing"


# ---- groups that teach nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "combination"), SETTINGS)
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_constant_groups_are_exactly_zero(mode: str, combination: str, eps: float) -> None:
    """Also of scores that are no binary fractions, whose mean is not exactly the score."""
    scores = two_rewards(4, 6)
    for name, value in (("a", 0.1), ("b", 1e9 + 0.3)):
        scores[name][2] = value
    scores["b"][1] = 0.7
    found = compute_advantages(scores, weights=WEIGHTS, mode=mode, combination=combination, eps=eps)
    assert (found.values[2] == 0).all()
    assert found.values.isfinite().all()
    assert (found.values[[0, 1, 3]] != 0).all()
    assert found.constant == (2,)
    assert found.constant_share == 0.25
    assert found.group_std["a"][2] == 0
    np.testing.assert_allclose(found.group_std["a"][[0, 1, 3]], scores["a"].numpy().std(axis=1)[[0, 1, 3]])
    assert found.group_std["b"].tolist()[1:3] == [0, 0]


@pytest.mark.parametrize(("mode", "combination"), SETTINGS)
def test_a_rollout_without_differences_has_no_advantages(mode: str, combination: str) -> None:
    scores = {"a": torch.full((2, 3), 0.1), "b": torch.full((2, 3), 0.2)}
    found = compute_advantages(scores, weights=WEIGHTS, mode=mode, combination=combination, eps=0.0)
    assert found.values.tolist() == [[0.0] * 3] * 2
    assert found.constant_share == 1


def test_a_single_generation_teaches_nothing() -> None:
    assert one(random(0, 3, 1), eps=0.0, correction=1).tolist() == [[0.0]] * 3


# ---- several rewards -----------------------------------------------------------------------------------------------


def combined(scores: dict[str, Tensor], combination: str, **options: Any) -> Tensor:
    return compute_advantages(scores, weights=WEIGHTS, combination=combination, **options).values


@pytest.mark.parametrize("mode", MODES)
def test_combinations_are_those_of_the_formulae(mode: str) -> None:
    scores = two_rewards()
    arrays = {name: tensor.numpy() for name, tensor in scores.items()}
    each = {name: reference(array, mode, 1e-4) for name, array in arrays.items()}
    summed = np.sum([WEIGHTS[name] * np.clip(each[name], -1.2, 1.2) for name in each], axis=0)
    np.testing.assert_allclose(combined(scores, "sum", mode=mode, clip=1.2), summed, rtol=1e-10)
    weighted = reference(np.sum([WEIGHTS[name] * arrays[name] for name in arrays], axis=0), mode, 1e-4)
    np.testing.assert_allclose(
        combined(scores, "weighted", mode=mode, clip=1.2), np.clip(weighted, -1.2, 1.2), rtol=1e-10
    )
    total = np.sum([WEIGHTS[name] * each[name] for name in each], axis=0)
    renormalized = (total - total.mean()) / (total.std() + 1e-4)
    found = combined(scores, "gdpo", mode=mode, clip=1.2)
    np.testing.assert_allclose(found, np.clip(renormalized, -1.2, 1.2), rtol=1e-10)


def test_the_terms_of_an_advantage() -> None:
    """There is one for each separately clipped reward, else the advantage alone; a group teaches if one term does."""
    scores = two_rewards(2, 3)
    scores["b"] = 4 * scores["a"]  # with weights of 1 and -1, advantages that cancel
    found = {c: compute_advantages(scores, weights={"a": 1.0, "b": -1.0}, combination=c, eps=0.0) for c in COMBINATIONS}
    each = one(scores["a"], eps=0.0)
    torch.testing.assert_close(found["separate"].terms, torch.stack([each, -each], dim=-1))
    assert found["separate"].constant == ()
    assert found["sum"].values.abs().max() < 1e-12
    for combination in ("sum", "weighted", "gdpo"):
        assert torch.equal(found[combination].terms, found[combination].values[..., None])
    torch.testing.assert_close(found["separate"].values, found["separate"].terms.sum(-1))


def test_what_distinguishes_the_combinations() -> None:
    """A reward with a large scale rules `weighted` but not `sum`; only `gdpo` keeps its size with more rewards."""
    scores = {"a": random(0, 2, 16), "b": 1000 * random(1, 2, 16)}
    found = {c: compute_advantages(scores, weights={"a": 1.0, "b": 1.0}, combination=c).values for c in COMBINATIONS}

    def likeness(values: Tensor, score: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([values.flatten(), one(score).flatten()]))[0, 1])

    assert likeness(found["weighted"], scores["b"]) > 0.999
    assert likeness(found["sum"], scores["a"]) > 0.5
    assert likeness(found["sum"], scores["b"]) > 0.5
    assert found["sum"].std(correction=0) > 1.2
    assert float(found["gdpo"].std(correction=0)) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_rewards_without_weight_have_no_say(combination: str) -> None:
    scores = two_rewards()
    alone = compute_advantages({"a": scores["a"]}, weights=WEIGHTS, combination=combination)
    scores["b"][0, 0] = math.nan
    both = compute_advantages(scores, weights={"a": 1.0, "b": 0.0}, combination=combination)
    assert torch.equal(both.values, alone.values)
    np.testing.assert_allclose(both.group_std["b"][0], scores["b"][0, 1:].numpy().std())


# ---- order, ranks, failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "combination"), SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_clips_does_not_matter(mode: str, combination: str, seed: int) -> None:
    """Bit for bit, of prompts and of the clips of a prompt."""
    scores, draws = two_rewards(4, 6), torch.Generator().manual_seed(seed)
    wanted = compute_advantages(scores, weights=WEIGHTS, mode=mode, combination=combination)
    prompts, clips = torch.randperm(4, generator=draws), torch.randperm(6, generator=draws)
    found = compute_advantages(
        {name: tensor[prompts][:, clips] for name, tensor in scores.items()},
        weights=WEIGHTS,
        mode=mode,
        combination=combination,
    )
    assert torch.equal(found.values, wanted.values[prompts][:, clips])
    assert torch.equal(found.group_std["a"], wanted.group_std["a"][prompts])


@pytest.mark.parametrize(("mode", "combination"), SETTINGS)
def test_failed_clips_take_no_part(mode: str, combination: str) -> None:
    """Exactly as if they had not been there, whatever stands in their place."""
    select_rank_weights = two_rewards(3, 5)
    wanted = compute_advantages(select_rank_weights, weights=WEIGHTS, mode=mode, combination=combination)
    failed = torch.zeros(3, 6, dtype=torch.bool)
    failed[0, 1] = failed[1, 0] = failed[2, 5] = True
    scores = {name: torch.zeros(3, 6, dtype=torch.float64) for name in select_rank_weights}
    for name, tensor in scores.items():
        tensor[~failed] = select_rank_weights[name].flatten()
    scores["a"][failed] = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
    found = compute_advantages(scores, weights=WEIGHTS, failed=failed, mode=mode, combination=combination)
    assert torch.equal(found.values[~failed], wanted.values.flatten())
    assert found.values[failed].tolist() == [0.0] * 3
    assert int(found.failed.sum()) == 3
    assert torch.equal(found.group_std["a"], wanted.group_std["a"])


@pytest.mark.parametrize(("mode", "combination"), SETTINGS)
def test_groups_that_failed_altogether_or_but_for_one(mode: str, combination: str) -> None:
    scores, failed = two_rewards(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    failed[0], failed[1, 1:] = True, True
    for tensor in scores.values():
        tensor[failed] = math.nan
    found = compute_advantages(scores, weights=WEIGHTS, failed=failed, mode=mode, combination=combination, eps=0.0)
    assert (found.values[:2] == 0).all()
    assert (found.values[2] != 0).all()
    assert found.constant == (0, 1)
    assert found.group_std["a"][0].isnan()
    failed[:] = True
    nothing = compute_advantages(scores, weights=WEIGHTS, failed=failed, mode=mode, combination=combination)
    assert not nothing.values.any()
    assert nothing.failed.all()


def test_an_infinite_score_is_refused_unless_it_failed() -> None:
    scores = two_rewards()
    scores["b"][1, 2] = math.inf
    with refused("invalid", "'b'", "1 clip", "10 (inf)"):
        compute_advantages(scores, weights=WEIGHTS)
    for name in ("a", "b"):
        scores[name][1, 2] = math.nan
    with refused("invalid", "clip 10 "):
        compute_advantages(scores, weights=WEIGHTS)


@pytest.mark.parametrize(("mode", "combination"), SETTINGS)
def test_a_reward_that_does_not_score_a_prompt_has_no_say_in_it(mode: str, combination: str) -> None:
    """The other reward decides; and of a clip that one reward does not score, the other's advantage is as before."""
    scores = two_rewards(3, 5)
    scores["b"][1] = math.nan
    scores["b"][2, 3] = math.nan
    result = compute_advantages(scores, weights=WEIGHTS, mode=mode, combination=combination)
    assert result.values.isfinite().all()
    assert not result.failed.any()
    alone = compute_advantages({"a": scores["a"]}, weights=WEIGHTS, mode=mode, combination=combination)
    if combination in ("sum", "separate"):
        torch.testing.assert_close(result.values[1], alone.values[1])
        torch.testing.assert_close(result.values[2, 3], alone.values[2, 3])
    if mode != "global_std":
        assert np.corrcoef(result.values[1], alone.values[1])[0, 1] == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: compute_advantages({}, weights={}), ": none"),
        (lambda: compute_advantages({"a": random(0, 2, 2)}, weights={"a": 0.0, "b": 1.0}), ": a."),
    ],
)
def test_mistakes_are_named(call: Callable[[], object], value: str) -> None:
    with refused("required", value):
        call()


# ---- best of n -----------------------------------------------------------------------------------------------------


def test_best_of_n_keeps_the_extremes_of_every_group() -> None:
    """DanceGRPO would take all four from the second prompt; here each gives its own."""
    values = torch.tensor([[0.1, -0.2, 0.3, 0.0], [9.0, -9.0, 8.0, -8.0]])
    assert best_of_n(values, 2).tolist() == [[1, 2], [4, 5]]
    assert best_of_n(values, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("n", [2, 4, 6, 8])
def test_best_of_n_against_sorting(n: int) -> None:
    values = random(5, 3, 8)
    kept = best_of_n(values, n)
    assert kept.shape == (3, n)
    for prompt, row in enumerate(kept):
        ranked = values[prompt].sort().values
        wanted = torch.cat([ranked[: n // 2], ranked[8 - n // 2 :]])
        assert torch.equal(values.flatten()[row].sort().values, wanted)
        assert row.tolist() == sorted(set(row.tolist()))
        assert set((row // 8).tolist()) == {prompt}


def test_best_of_n_among_equals_is_always_the_same() -> None:
    assert best_of_n(torch.zeros(2, 6), 4).tolist() == [[0, 1, 4, 5], [6, 7, 10, 11]]
    assert best_of_n(torch.tensor([[1.0, 1.0, 0.0, 1.0]]), 2).tolist() == [[2, 3]]


def test_best_of_n_avoids_failed_clips_but_keeps_the_count() -> None:
    values = torch.tensor([[0.0, 2.0, 1.0, -1.0, 0.5, 0.0]])
    failed = torch.tensor([[True, False, False, False, False, True]])
    assert best_of_n(values, 2, failed=failed).tolist() == [[1, 3]]
    assert best_of_n(values, 4, failed=failed).tolist() == [[1, 2, 3, 4]]
    assert best_of_n(values, 6, failed=failed).tolist() == [[0, 1, 2, 3, 4, 5]]
    failed[0, 4] = True
    assert best_of_n(values, 4, failed=failed).tolist() == [[0, 1, 2, 3]]
    failed[:] = True
    assert best_of_n(values, 2, failed=failed).tolist() == [[0, 1]]


def test_of_an_odd_number_one_more_is_of_the_best() -> None:
    """As DanceGRPO slices: `sorted[-n // 2:]` and `sorted[:n // 2]`."""
    values = random(0, 1, 8)
    ranked = values.flatten().argsort()
    for n in (3, 5, 7):
        expected = torch.cat([ranked[-n // 2 :], ranked[: n // 2]]).sort().values
        assert best_of_n(values, n).tolist() == [expected.tolist()]


@pytest.mark.parametrize("n", [0, 1, 10])
def test_best_of_n_refuses_what_cannot_be(n: int) -> None:
    with refused("invalid", f"best of {n}:", " 2 ", " 8 clips"):
        best_of_n(random(0, 2, 8), n)
