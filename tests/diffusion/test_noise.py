"""Noise processes and noise levels against float64 re-derivations."""

import math
from functools import partial

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift
from refusals import refused

from finetrainers.config.sections import DiffusionSection
from finetrainers.diffusion.process import FlowMatching, VariancePreserving
from finetrainers.diffusion.timesteps import (
    NoiseLevels,
    loss_weight,
    resolution_mu,
    sample_quantiles,
    shift_noise_level,
)

SHAPE = (3, 4, 2, 3, 5)


def normal(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def test_flow_matching_formulae():
    x0, eps, sigma = normal(0), normal(1), torch.tensor([0.0, 0.3, 1.0])
    flow = FlowMatching()
    x = flow.add_noise(x0, eps, sigma)
    for b in range(3):
        s = sigma[b].double()
        expected = (1 - s) * x0[b].double() + s * eps[b].double()
        torch.testing.assert_close(x[b].double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(flow.target(x0, eps, sigma), eps - x0)
    torch.testing.assert_close(flow.x0_from(flow.target(x0, eps, sigma), x, sigma), x0, rtol=0, atol=1e-5)


def test_flow_matching_takes_a_noise_level_per_latent_frame():
    x0, eps = normal(0), normal(1)
    t = torch.tensor([[0.0, 0.5]] * 3)
    x = FlowMatching().add_noise(x0, eps, t)
    assert torch.equal(x[:, :, 0], x0[:, :, 0])
    torch.testing.assert_close(x[:, :, 1], 0.5 * (x0 + eps)[:, :, 1])


def vp():
    scheduler = CogVideoXDDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
        rescale_betas_zero_snr=True, snr_shift_scale=3.0,
    )  # fmt: skip
    return VariancePreserving(scheduler.alphas_cumprod), scheduler.alphas_cumprod.double()


@pytest.mark.parametrize("step", [0, 2, 300, 700, 998, 999])
def test_v_loss_equals_the_weighted_x0_loss_of_the_literature(step):
    process, abar = vp()
    x0, eps, t = normal(0), normal(1), torch.full((3,), step)
    x_t = process.add_noise(x0, eps, t)
    a, s = abar[step].sqrt(), (1 - abar[step]).sqrt()
    torch.testing.assert_close(x_t.double(), a * x0.double() + s * eps.double(), rtol=0, atol=2e-6)
    prediction = process.target(x0, eps, t) + 0.1 * normal(2)
    v_loss = ((prediction - process.target(x0, eps, t)).double() ** 2).mean()
    exact = a * x0.double() + s * eps.double()
    x0_hat = a * exact - s * prediction.double()
    weighted = ((x0_hat - x0.double()) ** 2).mean() / (1 - abar[step])
    torch.testing.assert_close(v_loss, weighted, rtol=1e-3 if step < 10 else 1e-5, atol=0)
    torch.testing.assert_close(process.x0_from(process.target(x0, eps, t), x_t, t), x0, rtol=0, atol=1e-5)


def test_uniform_quantiles_give_every_index_the_same_share():
    process, _ = vp()
    u = (torch.arange(10_000) + 0.5) / 10_000
    assert torch.bincount(process.time_from_quantile(u), minlength=1000).unique().tolist() == [10]
    assert process.time_from_quantile(torch.tensor([0.0, 1.0])).tolist() == [0, 999]


def draws(scheme, n=20_000, **options):
    settings = {"flow_logit_mean": 0.0, "flow_logit_std": 1.0, "flow_mode_scale": 1.29, **options}
    # One generator drawn from many times stands in for many generators.
    g = torch.Generator().manual_seed(0)
    return sample_quantiles([g] * n, DiffusionSection(flow_weighting_scheme=scheme, **settings)).double()


def test_logit_normal_matches_its_quantiles_and_a_positive_mean_is_noisier():
    u = draws("logit_normal", flow_logit_mean=0.5, flow_logit_std=0.8)
    for q in (0.1, 0.5, 0.9):
        z = torch.distributions.Normal(0.5, 0.8).icdf(torch.tensor(q)).double()
        assert abs(u.quantile(q) - torch.sigmoid(z)) < 0.02
    assert u.mean() > draws("logit_normal").mean() + 0.05


def test_mode_and_uniform():
    v = torch.linspace(0, 1, 11, dtype=torch.float64)
    u = draws("mode")
    assert u.min() >= 0
    assert u.max() <= 1
    expected = 1 - v - 1.29 * (torch.cos(math.pi * v / 2) ** 2 - 1 + v)
    assert abs(u.quantile(0.5) - expected[5]) < 0.02  # the map is monotone, so medians map to medians
    assert abs(draws("none").mean() - 0.5) < 0.01


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 7.0])
def test_static_shift_is_the_schedulers(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    plain = FlowMatchEulerDiscreteScheduler(shift=1.0).sigmas
    torch.testing.assert_close(shift_noise_level(plain, shift), scheduler.sigmas, rtol=1e-5, atol=1e-6)


def test_resolution_shift_is_the_pipelines_exp_mu():
    config = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}
    levels = NoiseLevels(DiffusionSection(flow_resolution_shifting=True), is_flow=True, scheduler_config=config)
    for tokens in (192, 1024, 2688, 9000):
        mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
        assert levels.shift(tokens) == pytest.approx(math.exp(mu))
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **config)
        sigma = torch.linspace(0.1, 1, 10)
        expected = scheduler.time_shift(mu, 1.0, sigma)
        torch.testing.assert_close(shift_noise_level(sigma, levels.shift(tokens)), expected)
    assert resolution_mu(1024, config) == pytest.approx(0.95)


def test_user_values_win_over_the_schedulers():
    section = DiffusionSection(flow_resolution_shifting=True, flow_base_shift=0.1, flow_max_seq_len=2000)
    levels = NoiseLevels(section, is_flow=True, scheduler_config={"base_shift": 0.95, "max_shift": 2.05})
    assert levels.resolution == {
        "base_image_seq_len": 256, "max_image_seq_len": 2000, "base_shift": 0.1, "max_shift": 2.05
    }  # fmt: skip


def test_loss_weights_are_bounded():
    sigma = torch.tensor([0.0, 1e-3, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        loss_weight(sigma, "sigma_sqrt", maximum=10.0), torch.tensor([10.0, 10.0, 4.0, 1.0], dtype=torch.float64)
    )
    expected = 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    torch.testing.assert_close(loss_weight(sigma, "cosmap", maximum=10.0), expected)
    assert loss_weight(sigma, "cosmap", maximum=1.0).max() == 1.0
    assert loss_weight(sigma, "none", maximum=10.0).tolist() == [1.0] * 4


def test_weights_that_are_all_one_are_left_out():
    t = torch.tensor([0.1, 0.9])
    for is_flow, options, is_weighted in (
        (True, {}, False), (False, {"flow_weighting_scheme": "cosmap"}, False), (True, {"loss_weight_max": 0.5}, True),
        (True, {"flow_weighting_scheme": "cosmap"}, True), (True, {"flow_weighting_scheme": "sigma_sqrt"}, True),
    ):  # fmt: skip
        section = DiffusionSection(**options)
        weight = NoiseLevels(section, is_flow=is_flow, scheduler_config={}).weight(t)
        expected = loss_weight(t, section.flow_weighting_scheme, maximum=section.loss_weight_max)
        assert torch.equal(weight, expected) if is_weighted else weight is None
    torch.testing.assert_close(shift_noise_level(t, 1.0), t, rtol=0, atol=0)  # so that it is left out, too


def test_draws_depend_on_the_seed_only():
    levels = NoiseLevels(DiffusionSection(flow_weighting_scheme="logit_normal"), is_flow=True, scheduler_config={})
    first, again = (levels.sample([torch.Generator().manual_seed(7)], 100) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, levels.sample([torch.Generator().manual_seed(8)], 100))


def test_a_longer_sequence_must_be_longer():
    section = DiffusionSection(flow_resolution_shifting=True, flow_base_seq_len=4096)
    with refused("conflict", "--flow_max_seq_len 4096", "--flow_base_seq_len 4096"):
        NoiseLevels(section, is_flow=True, scheduler_config={})


@pytest.mark.parametrize("is_flow", [True, False])
def test_one_of_two_experts_is_trained_on_its_range_of_noise(is_flow: bool) -> None:
    generators = [torch.Generator().manual_seed(k) for k in range(200)]
    make = partial(NoiseLevels, DiffusionSection(), is_flow=is_flow, scheduler_config={})
    whole = make().sample(generators, 8)
    half = make(within=(0.5, 0.75)).sample([torch.Generator().manual_seed(k) for k in range(200)], 8)
    torch.testing.assert_close(half, 0.5 + 0.25 * whole)
    assert make().map_to_range(whole) is whole


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def mode_cdf(u: float, scale: float) -> float:
    """Find the uniform v of u = 1 - v - scale (cos^2(pi v / 2) - 1 + v) in steps; u falls as v grows."""
    v = 0.0
    for step in (2.0**-k for k in range(1, 50)):
        v += step if 1 - (v + step) - scale * (math.cos(math.pi * (v + step) / 2) ** 2 - 1 + v + step) > u else 0
    return 1 - v


@pytest.mark.parametrize("within", [(0.875, 1.0), (0.0, 0.9), (0.4, 0.6)])
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode"])
def test_the_distribution_of_an_expert_is_truncated(scheme: str, shift: float, within: tuple[float, float]) -> None:
    """Within its range it has the density of all noise: the rank of each draw is that of the whole distribution."""

    def cdf(t: float) -> float:
        u = t / (shift - (shift - 1) * t)
        if scheme == "logit_normal":
            return float(u == 1) if u in (0, 1) else normal_cdf((math.log(u / (1 - u)) - 0.3) / 0.8)
        return mode_cdf(u, 1.1) if scheme == "mode" else u

    section = DiffusionSection(
        flow_weighting_scheme=scheme, flow_shift=shift, flow_logit_mean=0.3, flow_logit_std=0.8, flow_mode_scale=1.1
    )
    make = partial(NoiseLevels, section, is_flow=True, scheduler_config={})
    draws = [
        make(within=bounds).sample([torch.Generator().manual_seed(k) for k in range(60)], 8).tolist()
        for bounds in ((0.0, 1.0), within)
    ]
    low, high = map(cdf, within)
    for whole, part in zip(*draws, strict=True):
        assert within[0] - 1e-7 <= part <= within[1]
        assert (cdf(part) - low) / (high - low) == pytest.approx(cdf(whole), abs=2e-5)
    assert len(set(draws[1])) == 60
