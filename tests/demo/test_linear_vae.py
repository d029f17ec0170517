"""The analytic VAE: what it reconstructs, that it is the stock class, and that its weights are the code it claims."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo
from refusals import refused

from finetrainers.demo.linear_vae import build_linear_vae

FRAMES, SIZE = 17, 64


def moving_clip(seed: int) -> torch.Tensor:
    """Smooth colored blobs that drift over a color gradient: `[3, F, H, W]` in [-1, 1]."""
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, FRAMES)[:, None, None]
    y, x = torch.meshgrid(torch.linspace(0, 1, SIZE), torch.linspace(0, 1, SIZE), indexing="ij")
    slope = torch.randn(3, 2, generator=g)
    clip = 0.4 * (slope[:, 0, None, None, None] * y + slope[:, 1, None, None, None] * x).expand(3, FRAMES, -1, -1)
    for _ in range(3):
        start, speed = torch.rand(2, generator=g), torch.rand(2, generator=g) - 0.5
        color, radius = torch.rand(3, generator=g) * 2 - 1, 0.08 + 0.1 * torch.rand(1, generator=g)
        distance = (y - start[0] - speed[0] * t) ** 2 + (x - start[1] - speed[1] * t) ** 2
        blob = torch.exp(-distance / (2 * radius**2))
        clip = clip * (1 - blob) + color[:, None, None, None] * blob
    return clip.clamp(-1, 1)


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of videos in [-1, 1]."""
    return 10 * math.log10(4 / (a.float() - b.float()).square().mean().item())


def round_trip(vae: AutoencoderKLLTXVideo, clip: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        z = vae.encode(clip[None].to(vae.dtype)).latent_dist.mode()
        return vae.decode(z, return_dict=False)[0][0].float().clamp(-1, 1)


@pytest.fixture(scope="module")
def clips():
    return [moving_clip(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def fitted(clips):
    return build_linear_vae(clips)


def test_reconstructs_fitted_and_unseen_clips(fitted, clips):
    vae = fitted
    assert (vae.spatial_compression_ratio, vae.temporal_compression_ratio) == (8, 4)
    assert min(psnr(round_trip(vae, clip), clip) for clip in clips) > 50
    unseen = moving_clip(99)
    assert psnr(round_trip(vae, unseen), unseen) > 45


def test_plain_from_pretrained_gives_it_back(fitted, clips, tmp_path):
    vae = fitted
    vae.save_pretrained(tmp_path)
    loaded = AutoencoderKLLTXVideo.from_pretrained(tmp_path)
    assert type(loaded) is AutoencoderKLLTXVideo
    assert torch.equal(round_trip(loaded, clips[0]), round_trip(vae, clips[0]))
    assert torch.equal(loaded.latents_std, vae.latents_std)


def test_latents_are_normalized_and_deterministic(fitted, clips):
    vae = fitted
    with torch.no_grad():
        dists = [vae.encode(clip[None]).latent_dist for clip in clips]
    codes = torch.cat([d.mode().transpose(0, 1).flatten(1) for d in dists], dim=1)
    latents = (codes - vae.latents_mean[:, None]) / vae.latents_std[:, None]
    torch.testing.assert_close(latents.mean(dim=1), torch.zeros(32), atol=1e-3, rtol=0)
    torch.testing.assert_close(latents.std(dim=1), torch.ones(32), atol=1e-3, rtol=0)
    assert max(d.std.max() for d in dists) < 1e-6


def test_the_network_computes_the_code_itself(clips):
    """With as many components as values, nothing is lost but what the end of each half approximates."""
    vae = build_linear_vae(clips[:2], patch_size=1, keep=(), latent_channels=24)
    assert psnr(round_trip(vae, clips[0]), clips[0]) > 100
    # An orthonormal code keeps distances; a single frame is coded as two equal ones.
    first, second = clips[0][:, :1], clips[1][:, :1]
    with torch.no_grad():
        a, b = (vae.encode(frame[None]).latent_dist.mode() for frame in (first, second))
    assert (a - b).norm().item() == pytest.approx((first - second).norm().item() * math.sqrt(2), rel=1e-3)


def test_bf16_costs_little(fitted, clips, tmp_path):
    vae = fitted
    vae.save_pretrained(tmp_path)
    half = AutoencoderKLLTXVideo.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    clip = clips[0][:, :9, 16:48, 16:48]  # CPUs compute slowly in bf16
    assert psnr(round_trip(half, clip), clip) > 50


def test_same_clips_same_weights_and_no_random_numbers(fitted, clips):
    state = torch.random.get_rng_state()
    again = build_linear_vae(clips)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in again.state_dict().items():
        assert torch.equal(value, fitted.state_dict()[name]), name


def test_flat_clips_give_finite_latents():
    flat = [torch.full((3, 5, 16, 16), value) for value in (-0.5, 0.5)]
    vae = build_linear_vae(flat)
    assert vae.latents_std.min() > 0
    assert psnr(round_trip(vae, flat[0]), flat[0]) > 50
    black = [torch.zeros(3, 5, 16, 16)]
    vae = build_linear_vae(black)
    assert vae.latents_std.min() > 0
    assert round_trip(vae, black[0]).abs().max() < 1e-3


def test_wrong_sizes_are_refused(clips):
    with refused("invalid", "clip 1 ", " 16 ", "64 x 64", "4*k+1"):
        build_linear_vae([clips[0], clips[1][:, :16]])
    with refused("invalid", "clip 0 ", "60 x 64", " 8"):
        build_linear_vae([clips[0][:, :, :60]])
    with refused("invalid", "clip 0 ", "(2, ", "[3, "):
        build_linear_vae([clips[0][:2]])
    with refused("required", "clip"):
        build_linear_vae([])
    with refused("too_large", 96, 97):
        build_linear_vae(clips[:1], keep=(97,))
