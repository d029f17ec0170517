"""Every schedule, at every step, against its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from finetrainers.config.sections import OptimizerSection
from finetrainers.optim.schedules import lr_schedule

STEPS = 100
SHAPES = {
    "constant_with_warmup": lambda p, cycles, power: np.ones_like(p),
    "linear": lambda p, cycles, power: 1 - p,
    "cosine": lambda p, cycles, power: (1 + np.cos(np.pi * p)) / 2,
    "cosine_with_restarts": lambda p, cycles, power: np.where(p < 1, (1 + np.cos(np.pi * (cycles * p % 1))) / 2, 0),
    "polynomial": lambda p, cycles, power: (1 - p) ** power,
}


def expected(name: str, warmup: int, cycles: int, power: float) -> np.ndarray:
    """f(0), ..., f(STEPS), in float64."""
    k = np.arange(STEPS + 1, dtype=np.float64)
    if name == "constant":
        return np.ones_like(k)
    p = np.clip((k - warmup) / max(STEPS - warmup, 1), 0, 1)
    return np.where(k < warmup, k / max(warmup, 1), SHAPES[name](p, cycles, power))


@pytest.mark.parametrize("name", ["constant", *SHAPES])
@pytest.mark.parametrize("warmup", [0, 1, 37])
@pytest.mark.parametrize(("cycles", "power"), [(1, 1.0), (4, 2.5)])
def test_factor(name: str, warmup: int, cycles: int, power: float) -> None:
    config = OptimizerSection(lr_scheduler=name, lr_warmup_steps=warmup, lr_num_cycles=cycles, lr_power=power)
    factor = lr_schedule(config, lr=1.0, total_steps=STEPS)
    found = [factor(k) for k in range(STEPS + 1)]
    np.testing.assert_allclose(found, expected(name, warmup, cycles, power), atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
@pytest.mark.parametrize("warmup", [0, 50, STEPS - 1])
def test_ends_at_zero(name: str, warmup: int) -> None:
    config = OptimizerSection(lr_scheduler=name, lr_warmup_steps=warmup)
    factor = lr_schedule(config, lr=1.0, total_steps=STEPS)
    assert factor(STEPS) == pytest.approx(0, abs=1e-12)


def test_a_schedule_may_start_within_a_run() -> None:
    config = OptimizerSection(lr_scheduler="cosine_with_restarts", lr_warmup_steps=10, lr_num_cycles=3)
    schedule = lr_schedule(config, lr=0.25, total_steps=STEPS, first_step=7)
    found = [schedule(7 + k) for k in range(STEPS + 1)]
    np.testing.assert_allclose(found, 0.25 * expected("cosine_with_restarts", 10, 3, 1.0), atol=1e-12)


def test_bump_is_the_one_cycle_policy_and_constant_after_it() -> None:
    """Up to the end of the cooldown it equals PyTorch's, whose last step is that end."""
    warmup, cooldown, start, peak = 7, 12, 0.2, 4.0
    config = OptimizerSection(
        lr_scheduler="bump", lr_warmup_steps=warmup, lr_cooldown_steps=cooldown, lr_bump_start=start, lr_bump_peak=peak
    )
    schedule = lr_schedule(config, lr=0.5, total_steps=STEPS, first_step=3)
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        theirs, max_lr=0.5 * peak, total_steps=warmup + cooldown + 1, pct_start=(warmup + 1) / (warmup + cooldown + 1),
        div_factor=peak / start, final_div_factor=start, cycle_momentum=False,
    )  # fmt: skip
    expected = []
    for _ in range(warmup + cooldown + 1):
        expected.append(cycle.get_last_lr()[0])
        theirs.step()
        if len(expected) <= warmup + cooldown:
            cycle.step()
    found = [schedule(3 + k) for k in range(STEPS)]
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-9)
    assert (found[0], max(found)) == (pytest.approx(0.1), 2.0)
    assert set(found[warmup + cooldown :]) == {0.5}


@pytest.mark.parametrize(("warmup", "cooldown", "first"), [(0, 5, 3.0), (0, 0, 1.0), (4, 0, 0.1), (4, None, 0.1)])
def test_either_side_of_a_bump_may_be_left_out(warmup: int, cooldown: int | None, first: float) -> None:
    config = OptimizerSection(lr_scheduler="bump", lr_warmup_steps=warmup, lr_cooldown_steps=cooldown, lr_bump_peak=3)
    factor = lr_schedule(config, lr=1.0, total_steps=STEPS)
    assert factor(0) == pytest.approx(first)
    end = warmup + (warmup if cooldown is None else cooldown)
    assert [factor(k) for k in range(end, STEPS)] == [1.0] * (STEPS - end)
    if cooldown is None:
        assert factor(warmup) == 3


def test_warm_up_may_fill_the_run() -> None:
    config = OptimizerSection(lr_scheduler="polynomial", lr_warmup_steps=STEPS)
    factor = lr_schedule(config, lr=1.0, total_steps=STEPS)
    assert [factor(k) for k in range(STEPS + 1)] == [*(k / STEPS for k in range(STEPS)), 0]
