"""Steps that get noise and are trained: pure functions that reach every step but the last; and the weights of steps."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from finetrainers.config.grpo import GRPOSection, step_range, trained_steps
from finetrainers.diffusion.policy import Kernel, Transitions, levels, transition_mean, transitions
from finetrainers.diffusion.process import FlowMatching, Process, VariancePreserving
from finetrainers.methods.grpo.rollout.sde_schedule import SDEWindows, StepWeight, step_weights

STRATEGIES = ["fixed", "progressive", "random"]


def windows(steps: int = 16, *, seed: int = 5, size: int = 2, fraction: float = 1.0, **options: Any) -> SDEWindows:
    given = {f"window_{name}": value for name, value in {"size": size, **options}.items()}
    return SDEWindows(GRPOSection(sampling_steps=steps, timestep_fraction=fraction, **given), seed, range(steps))


# ---- which steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "steps", "size", "span", "fraction", "per_prompt"),
    product(STRATEGIES, [2, 5, 16], [0, 1, 3], [(0.0, 0.5), (0.25, 1.0), (0.0, 1.0)], [1.0, 0.6], [False, True]),
)
def test_what_holds_for_all_settings(
    strategy: str, steps: int, size: int, span: tuple[float, float], fraction: float, per_prompt: bool
) -> None:
    section = GRPOSection(sampling_steps=steps, window_size=size, window_range=list(span), timestep_fraction=fraction)
    if size > len(step_range(section)) or not trained_steps(section):
        return  # refused: see `methods.grpo.option_rules`
    plan, again = (
        windows(steps, size=size, range=span, strategy=strategy, fraction=fraction, per_prompt=per_prompt)
        for _ in range(2)
    )
    seen: set[int] = set()
    for rollout, slot in product(range(40), range(4)):
        stochastic, trained = plan.stochastic(rollout, slot), plan.trained(rollout, slot)
        assert stochastic == tuple(range(stochastic[0], stochastic[0] + plan.num_stochastic))
        assert 0 <= stochastic[0] <= stochastic[-1] < steps - 1, "the last step is never stochastic"
        assert set(trained) <= set(stochastic)
        assert trained == tuple(sorted(set(trained)))
        assert len(trained) == plan.num_trained > 0, "ranks with other clips have as much to do"
        if size:
            low, high = math.floor(span[0] * steps + 0.5), math.floor(span[1] * steps + 0.5)
            assert low <= stochastic[0] <= stochastic[-1] < high
        seen |= set(trained)
    assert seen == set(plan.pool())
    for rollout, slot in [(39, 3), (0, 0), (7, 1)]:
        assert again.trained(rollout, slot) == plan.trained(rollout, slot), "whatever was asked before"


def test_zero_is_every_step_but_the_last() -> None:
    for strategy in STRATEGIES:
        assert windows(16, size=0, range=(0.5, 0.75), strategy=strategy).trained(3, 2) == tuple(range(15))


def test_the_first_half_of_sixteen_steps_is_eight() -> None:
    assert windows(size=8).stochastic(0) == tuple(range(8))


@pytest.mark.parametrize(
    ("steps", "span", "wanted"),
    [(16, (0.0, 0.5), range(8)), (16, (0.5, 1.0), range(8, 15)), (5, (0.0, 0.5), range(3)), (6, (0.0, 0.5), range(3)),
     (10, (0.3, 0.7), range(3, 7)), (100, (0.29, 0.58), range(29, 58))],
)  # fmt: skip
def test_the_range_in_whole_steps(steps: int, span: tuple[float, float], wanted: range) -> None:
    assert set(windows(steps, size=1, range=span).pool()) == set(wanted)


def test_fixed_stays() -> None:
    assert {windows(size=3, strategy="fixed", range=(0.25, 1.0)).stochastic(r) for r in range(9)} == {(4, 5, 6)}


def test_progressive_moves_by_stride_every_few_rollouts_and_starts_over() -> None:
    """MixGRPO: a window of 4 that slides by one step every 25 iterations."""
    plan = windows(9, size=4, range=(0.0, 1.0), strategy="progressive", every=25)
    starts = [plan.stochastic(rollout)[0] for rollout in range(250)]
    assert starts == [rollout // 25 % 5 for rollout in range(250)]
    assert plan.stochastic(25, 3) == (1, 2, 3, 4)
    coarse = windows(16, size=4, range=(0.0, 0.7), strategy="progressive", stride=3)
    assert [coarse.stochastic(rollout)[0] for rollout in range(6)] == [0, 3, 6, 7, 0, 3]
    assert Counter(coarse.pool()) == Counter(step for start in (0, 3, 6, 7) for step in range(start, start + 4))


def test_random_windows_are_equally_likely() -> None:
    plan = windows(16, size=2)
    drawn = Counter(plan.stochastic(rollout)[0] for rollout in range(4000))
    assert set(drawn) == set(range(7))
    assert all(abs(count - 4000 / 7) < 6 * (4000 / 7) ** 0.5 for count in drawn.values())
    steps = Counter(step for rollout in range(4000) for step in plan.trained(rollout))
    share = Counter(plan.pool())
    assert all(steps[step] / 8000 == pytest.approx(share[step] / len(plan.pool()), abs=0.02) for step in range(8))


def test_seeds_and_rollouts_draw_for_themselves() -> None:
    plan = windows(32, size=1)
    chosen = [plan.stochastic(rollout) for rollout in range(50)]
    assert [windows(32, size=1, seed=6).stochastic(rollout) for rollout in range(50)] != chosen
    assert len(set(chosen)) > 10


def test_one_window_a_rollout_or_one_a_prompt() -> None:
    """Flash-GRPO: one step a prompt, the same for all of its clips, drawn anew in every rollout."""
    together, flash = windows(size=1), windows(size=1, per_prompt=True)
    assert all(len({together.stochastic(rollout, slot) for slot in range(16)}) == 1 for rollout in range(9))
    drawn = [[flash.trained(rollout, slot) for slot in range(16)] for rollout in range(9)]
    assert all(len(set(row)) > 3 for row in drawn)
    assert len(set(map(tuple, drawn))) == 9
    assert {step for row in drawn for (step,) in row} == set(range(8))


# ---- the share that is trained -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "fraction", "trained"), [(16, 0.6, 9), (12, 0.5, 5), (101, 0.29, 29), (16, 1.0, 15), (11, 0.7, 7)]
)
def test_the_share_is_rounded_down_as_in_dancegrpo(steps: int, fraction: float, trained: int) -> None:
    """int((16 - 1) * 0.6) = 9, and 5 of the 12 steps of the guide that says 6. But 100 * 0.29 is 29."""
    assert windows(steps, size=0, fraction=fraction).num_trained == trained


def test_the_share_is_drawn_anew_for_every_prompt_and_rollout() -> None:
    plan = windows(16, size=0, fraction=0.6)
    drawn = {(rollout, slot): plan.trained(rollout, slot) for rollout in range(20) for slot in range(20)}
    assert len(set(drawn.values())) > 300
    counts = Counter(step for steps in drawn.values() for step in steps)
    assert set(counts) == set(range(15))
    assert all(abs(count - 400 * 0.6) < 6 * (400 * 0.24) ** 0.5 for count in counts.values())


# ---- weights -------------------------------------------------------------------------------------------------------


def shifted(steps: int, shift: float) -> Tensor:
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1]
    return shift * t / (1 + (shift - 1) * t)


def vp() -> VariancePreserving:
    """A cosine schedule that ends in pure noise."""
    angle = torch.linspace(0.02, math.pi / 2, 1000, dtype=torch.float64)
    return VariancePreserving(angle.cos() ** 2)


def case(name: str, kernel: Kernel, eta: float) -> tuple[Process, Tensor, Transitions, Tensor, Tensor]:
    process: Process = FlowMatching() if name == "flow" else vp()
    times = shifted(16, 5.0).float() if name == "flow" else torch.linspace(999, 0, 17)[:-1].round().long()
    alpha, sigma = levels(process, times)
    return process, times, transitions(kernel, alpha, sigma, eta=eta), alpha, sigma


KERNELS: list[tuple[Kernel, float]] = [("flow", 0.7), ("dance", 0.25), ("cps", 0.7), ("ddim", 0.3)]
KINDS: list[StepWeight] = ["none", "flash", "noise"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kernel", "eta"), KERNELS)
@pytest.mark.parametrize("process", ["flow", "vp"])
def test_weights_have_mean_one_over_the_trained_steps(
    kind: StepWeight, kernel: Kernel, eta: float, process: str
) -> None:
    _, _, steps, alpha, sigma = case(process, kernel, eta)
    over = windows(16, size=3).pool()
    weights = step_weights(kind, steps, alpha, sigma, over=over)
    assert weights.dtype == torch.float64
    assert weights.shape == (16,)
    assert weights[-1] == 0
    assert (weights[:-1] > 0).all()
    assert float(weights[list(over)].mean()) == pytest.approx(1.0)
    assert (kind == "none") == bool((weights[:-1] == 1).all())


@pytest.mark.parametrize(("kernel", "eta"), [("flow", 0.7), ("dance", 0.25)])
def test_flash_is_that_of_the_paper_for_flow_matching(kernel: Kernel, eta: float) -> None:
    """lambda = 1 / (sqrt(-dt) / g + g sqrt(-dt) (1 - s) / (2 s)), g being the noise rate."""
    _, _, steps, alpha, sigma = case("flow", kernel, eta)
    wanted = []
    for i in range(15):
        s, root = float(sigma[i]), math.sqrt(float(sigma[i] - sigma[i + 1]))
        g = eta if kernel == "dance" else eta * math.sqrt(s / (1 - (s if s < 1 else float(sigma[1]))))
        wanted.append(1 / (root / g + g * root * (1 - s) / (2 * s)))
    found = step_weights("flash", steps, alpha, sigma, over=range(15))
    torch.testing.assert_close(found[:15], torch.tensor(wanted, dtype=torch.float64) * 15 / sum(wanted))


def test_flash_reproduces_the_published_table() -> None:
    """Flash-GRPO's training script lists them for its model: 20 steps, shift 3, noise rate sigma_max * sigma."""
    table = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
    sigma = torch.cat([shifted(20, 3.0), torch.zeros(1, dtype=torch.float64)])
    s, fall = sigma[:-1], sigma[:-1] - sigma[1:]
    rate = sigma[1] * s
    steps = Transitions(x0=1 - sigma[1:], eps=sigma[1:] - rate**2 * fall / (2 * s), std=rate * fall.sqrt())
    steps.std[-1] = 0
    found = step_weights("flash", steps, 1 - sigma, sigma, over=range(10))
    wanted = torch.tensor(table, dtype=torch.float64)
    torch.testing.assert_close(found[:10], wanted / wanted.mean(), rtol=0.01, atol=0)


@pytest.mark.parametrize(("kernel", "eta"), KERNELS)
@pytest.mark.parametrize("name", ["flow", "vp"])
def test_weights_undo_what_they_say(name: str, kernel: Kernel, eta: float) -> None:
    """The gradient of the log-density by the prediction, from autograd at a sampled transition, times the weight.

    With flash it is the noise z itself, whatever the step, with noise z dmean/dv.
    """
    process, times, steps, alpha, sigma = case(name, kernel, eta)
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(1, 2, 1, 4, 4, generator=generator) for _ in range(2))
    flash, noise = (step_weights(kind, steps, alpha, sigma, over=range(15)) for kind in ("flash", "noise"))
    sizes, slopes = [], []
    for i in range(15):
        v = torch.randn(x.shape, generator=generator).requires_grad_()
        at = steps.at_steps(torch.tensor([i]), torch.device("cpu"))
        mean = transition_mean(process, v, x, times[i : i + 1], at)
        std = at.std.item()
        value = (mean + std * z).detach()
        (slope,) = torch.autograd.grad(mean.sum(), v, retain_graph=True)
        (gradient,) = torch.autograd.grad((-0.5 * ((value - mean) / std) ** 2).sum(), v)
        sizes.append(float(flash[i]) * float(gradient.norm() / z.norm()))
        slopes.append(float(noise[i]) * float(gradient.norm() / z.norm()) / float(slope.abs().mean()))
    assert sizes == pytest.approx([sizes[0]] * 15, rel=1e-3)
    assert slopes == pytest.approx([slopes[0]] * 15, rel=1e-3)


def test_steps_without_noise_cannot_be_trained() -> None:
    _, _, steps, alpha, sigma = case("flow", "dance", 0.25)
    with pytest.raises(ValueError, match=r"steps \[15\]"):
        step_weights("none", steps, alpha, sigma, over=[3, 15])
    with pytest.raises(ValueError, match="no steps"):
        step_weights("none", steps, alpha, sigma, over=[])
