"""Transition kernels against the published closed forms, diffusers' samplers and Gaussian marginals."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, FlowMatchEulerDiscreteScheduler
from refusals import refused
from torch import Tensor

from finetrainers.diffusion.policy import (
    Transitions,
    levels,
    log_density,
    only,
    sample,
    transition_mean,
    transitions,
)
from finetrainers.diffusion.process import FlowMatching, Process, VariancePreserving

KERNELS = ("flow", "dance", "cps", "ddim")
ETA = {"flow": 0.7, "dance": 0.25, "cps": 0.5, "ddim": 0.3}


def flow_times(steps: int, shift: float = 5.0) -> Tensor:
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1]
    return shift * t / (1 + (shift - 1) * t)


def cosine_vp() -> VariancePreserving:
    """A cosine schedule that ends in pure noise."""
    t = torch.linspace(0, 1, 1000, dtype=torch.float64)
    return VariancePreserving((torch.cos(t * math.pi / 2) ** 2).clamp(0, 1 - 1e-6))


def processes() -> list[tuple[Process, Tensor]]:
    return [(FlowMatching(), flow_times(16)), (cosine_vp(), torch.arange(999, 0, -62))]


@pytest.mark.parametrize(("process", "times"), processes(), ids=["flow", "vp"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_noise_is_the_deterministic_step(kernel: str, process: Process, times: Tensor) -> None:
    found = transitions(kernel, *levels(process, times), eta=0.0)
    expected = transitions("ode", *levels(process, times), eta=0.0)
    assert torch.equal(found.x0, expected.x0)
    assert torch.equal(found.eps, expected.eps)
    assert found.std.abs().max() == 0


@pytest.mark.parametrize(("process", "times"), processes(), ids=["flow", "vp"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_last_step_is_deterministic(kernel: str, process: Process, times: Tensor) -> None:
    found = transitions(kernel, *levels(process, times), eta=ETA[kernel])
    assert found.std[-1] == 0
    assert found.eps[-1] == 0
    assert found.x0[-1] == 1
    assert (found.std[:-1] > 0).all()


def test_published_forms_of_rectified_flow() -> None:
    """x (1 + g^2 dt / 2s) + v (1 + g^2 (1 - s) / 2s) dt, with g = eta (Dance) or eta sqrt(s / (1 - s)) (Flow)."""
    times = flow_times(12, shift=3.0)
    sigmas = torch.cat([times, times.new_zeros(1)])
    x, v = torch.randn(2, 1, 4, 2, 3, 3, dtype=torch.float64)
    for kernel, eta in (("dance", 0.25), ("flow", 0.7)):
        table = transitions(kernel, *levels(FlowMatching(), times), eta=eta)
        for i in range(len(times) - 1):
            s, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
            denominator = sigmas[1] if s == 1 else s
            g = eta if kernel == "dance" else eta * torch.sqrt(s / (1 - denominator))
            expected = x * (1 + g**2 / (2 * s) * dt) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt
            step = table.at_steps(torch.tensor([i]), torch.device("cpu"))
            found = transition_mean(FlowMatching(), v.float(), x.float(), s[None].float(), step)
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(table.std[i], g * torch.sqrt(-dt))


def test_published_form_of_cps() -> None:
    times = flow_times(8)
    table = transitions("cps", *levels(FlowMatching(), times), eta=0.7)
    for i in range(7):
        following = times[i + 1]
        std = following * math.sin(0.7 * math.pi / 2)
        torch.testing.assert_close(table.std[i], std)
        torch.testing.assert_close(table.eps[i], torch.sqrt(following**2 - std**2))
        torch.testing.assert_close(table.x0[i], 1 - following)


def test_ode_is_the_euler_sampler() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    x = reference = torch.randn(1, 4, 2, 3, 3)
    table = transitions("ode", *levels(FlowMatching(), scheduler.sigmas[:-1]), eta=0.0)
    for i, t in enumerate(scheduler.timesteps):
        v = torch.sin(reference)
        step = table.at_steps(torch.tensor([i]), x.device)
        x = transition_mean(FlowMatching(), torch.sin(x), x, scheduler.sigmas[i][None], step)
        reference = scheduler.step(v, t, reference, return_dict=False)[0]
    torch.testing.assert_close(x, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_ddim_is_the_ddim_sampler(eta: float) -> None:
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True
    )
    scheduler.set_timesteps(10)
    process = VariancePreserving(scheduler.alphas_cumprod)
    table = transitions("ddim", *levels(process, scheduler.timesteps), eta=eta)
    assert table.std[0] == pytest.approx(eta * float(levels(process, scheduler.timesteps)[1][1]), abs=1e-6)
    if eta:  # the family's scheduler takes no eta
        return
    x = reference = torch.randn(1, 4, 2, 3, 3)
    for i, t in enumerate(scheduler.timesteps):
        v = torch.sin(reference)
        x = transition_mean(process, torch.sin(x), x, t[None], table.at_steps(torch.tensor([i]), x.device))
        reference = scheduler.step(v, t, reference, return_dict=False)[0]
    torch.testing.assert_close(x, reference, rtol=1e-4, atol=1e-4)


def test_ddim_and_cps_keep_the_noise_level() -> None:
    """Noise left and noise added make up the level of the next step."""
    for process, times in processes():
        _, sigma = levels(process, times)
        for kernel in ("ddim", "cps"):
            table = transitions(kernel, *levels(process, times), eta=0.8)
            torch.testing.assert_close(table.eps**2 + table.std**2, sigma[1:] ** 2)


def exact_prediction(process: Process, x: Tensor, t: Tensor, mean: float, std: float) -> Tensor:
    """What a perfect network predicts for data from N(mean, std^2)."""
    a, s = (c.view(-1, 1, 1, 1, 1) for c in process.alpha_sigma(t))
    x0 = mean + a * std**2 / (a**2 * std**2 + s**2) * (x - a * mean)
    eps = (x - a * x0) / s
    return process.target(x0, eps, t)


@pytest.mark.parametrize("kernel", ["ode", "flow", "dance", "ddim"])
@pytest.mark.parametrize(
    ("process", "times"), [(FlowMatching(), flow_times(100)), (cosine_vp(), torch.arange(999, 0, -5))]
)
def test_the_marginal_is_that_of_the_ode(kernel: str, process: Process, times: Tensor) -> None:
    """CPS is left out on purpose: its noise does not shrink with the step, and its marginal is another."""
    generator = torch.Generator().manual_seed(0)
    table = transitions(kernel, *levels(process, times), eta=ETA.get(kernel, 0.0))
    x = torch.randn(40_000, 1, 1, 1, 1, generator=generator)
    for i, t in enumerate(times):
        step = table.at_steps(torch.full((len(x),), i), x.device)
        at = t.expand(len(x)).to(torch.float32 if t.is_floating_point() else torch.long)
        mean = transition_mean(process, exact_prediction(process, x, at, 1.5, 0.3), x, at, step)
        x = sample(mean, torch.randn(x.shape, generator=generator), step.std)
    assert x.mean().item() == pytest.approx(1.5, abs=0.01)
    assert x.std().item() == pytest.approx(0.28 if process.is_flow else 0.297, abs=0.012)


def test_density_is_the_normal_one() -> None:
    value, mean = torch.randn(2, 3, 4, 2, 3, 3)
    std = torch.tensor([0.1, 0.5, 2.0])
    reference = torch.distributions.Normal(mean.double(), std.double().view(3, 1, 1, 1, 1))
    expected = reference.log_prob(value.double()).flatten(1).mean(1)
    torch.testing.assert_close(log_density(value, mean, std).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
def test_replaying_a_stored_latent_gives_the_same_density(storage: torch.dtype) -> None:
    mean, noise = torch.randn(2, 2, 4, 2, 8, 8)
    std = torch.tensor([0.03, 0.1])
    value = sample(mean, noise, std, storage=storage)
    stored = value.to(storage).float()
    assert torch.equal(log_density(stored, mean, std), log_density(value, mean, std))


def test_gradient_of_the_density_is_the_score_of_the_mean() -> None:
    mean = torch.randn(2, 4, 2, 3, 3, requires_grad=True)
    std = torch.tensor([0.1, 0.3])
    value = mean.detach() + 0.1
    log_density(value, mean, std).sum().backward()
    expected = (value - mean.detach()) / std.view(2, 1, 1, 1, 1) ** 2 / mean[0].numel()
    torch.testing.assert_close(mean.grad, expected)


def test_a_window_is_stochastic_and_the_rest_is_not() -> None:
    alpha, sigma = levels(FlowMatching(), flow_times(8))
    flow, ode = transitions("flow", alpha, sigma, eta=0.7), transitions("ode", alpha, sigma, eta=0.0)
    window = only(flow, ode, torch.tensor([2, 3]))
    for i in range(8):
        expected = flow if i in (2, 3) else ode
        assert (window.std[i], window.eps[i]) == (expected.std[i], expected.eps[i])


def test_per_clip_steps() -> None:
    table = Transitions(torch.arange(3.0), torch.arange(3.0) * 2, torch.arange(3.0) * 3)
    found = table.at_steps(torch.tensor([2, 0]), torch.device("cpu"))
    assert found.eps.tolist() == [4.0, 0.0]


def test_bad_levels_and_etas_are_refused() -> None:
    alpha, sigma = levels(FlowMatching(), torch.tensor([0.5, 0.8]))
    with refused("invalid", "[0.5, 0.8, 0.0]"):
        transitions("flow", alpha, sigma, eta=0.7)
    with refused("invalid", "eta", "'ddim'", "[0, 1]", "1.5"):
        transitions("ddim", *levels(FlowMatching(), flow_times(4)), eta=1.5)


@pytest.mark.parametrize("start", [0.999999, 0.99999501])
def test_a_first_level_just_below_pure_noise_is_pure_noise(start: float) -> None:
    """Multistep solvers start at 0.999999; their `flow` steps are those of a schedule that starts at 1."""
    times = flow_times(10, shift=3.0)
    wanted = transitions("flow", *levels(FlowMatching(), times), eta=0.7)
    times[0] = start
    found = transitions("flow", *levels(FlowMatching(), times), eta=0.7)
    for a, b in ((found.x0, wanted.x0), (found.eps, wanted.eps), (found.std, wanted.std)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert float(found.std.max()) < 1


@pytest.mark.parametrize(
    ("kernel", "eta", "times"),
    [
        ("flow", 0.7, torch.tensor([0.9999, 0.7, 0.4])),  # a rate of 70 at the first step
        ("dance", 4.0, torch.tensor([1.0, 0.7, 0.4])),
        ("dance", math.nan, torch.tensor([1.0, 0.7, 0.4])),
        ("dance", -0.3, torch.tensor([1.0, 0.7, 0.4])),
    ],
)
def test_noise_that_no_clip_survives_is_refused(kernel: str, eta: float, times: Tensor) -> None:
    with refused("too_large", f"sampler '{kernel}'", " step 1 of 3 ", "--eta"):
        transitions(kernel, *levels(FlowMatching(), times.double()), eta=eta)


def test_times_that_are_no_noise_levels_are_refused() -> None:
    """A scheduler that gives thousandths, say."""
    with refused("invalid", "[1000.0, 500.0, 0.0]"):
        transitions("ode", *levels(FlowMatching(), torch.tensor([1000.0, 500.0])), eta=0.0)
