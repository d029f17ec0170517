"""The gradient of decoded pixels by latents, of every family's tiny VAE: recomputed, in slices, after an OOM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES, short_clip
from torch import Tensor

from finetrainers.config.sections import ModelSection
from finetrainers.models.decoding import decode_gradient, in_vae_dtype
from finetrainers.models.registry import get_family


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_that_of_autograd(family: str, tiny_repo: Callable[..., Path]) -> None:
    section = ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)), vae_dtype="fp32")
    spec = get_family(family).load(section)
    vae: Any = spec.load_vae()
    stats, geometry = spec.vae_stats(vae), spec.facts.geometry
    size = (short_clip(family), 64, 64)
    shape = geometry.latent_shape(*size)
    channels = spec.latent_channels(spec.transformer_on_meta())
    latents = torch.randn(2, channels, *shape, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))

    def score(video: Tensor) -> tuple[Tensor, Tensor]:
        return (video * weights).sum(), video.detach()

    z = latents.clone().requires_grad_()
    plain = (spec.decode_latents(vae, stats.denormalize(z)) / 2 + 0.5).clamp(0, 1)
    (wanted,) = torch.autograd.grad((plain * weights).sum(), z)
    assert wanted.abs().max() > 0

    for checkpointing in (False, True):
        found, video = decode_gradient(spec, vae, latents, stats, score, checkpointing=checkpointing)
        assert torch.equal(video, spec.decode(vae, latents, stats))
        assert torch.equal(found, wanted)
    assert "forward" not in vars(vae.decoder)
    assert not getattr(vae, "is_gradient_checkpointing", False)

    failures = iter([True])

    def fails_once(video: Tensor) -> tuple[Tensor, Tensor]:
        """Within the work that is retried, as a backward pass would."""
        if next(failures, False):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return score(video)

    found, _ = decode_gradient(spec, vae, latents, stats, fails_once, checkpointing=True)
    assert spec.vae_one_by_one == {size}
    assert vae.use_slicing
    # A pixel at a bound of the range is clamped or not by a rounding error, so that single numbers may differ.
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_pipeline_calls_the_vae_in_its_dtype(dtype: str, tiny_repo: Callable[..., Path]) -> None:
    section = ModelSection(pretrained_model_name_or_path=str(tiny_repo("ltx_video")), vae_dtype=dtype)
    vae: Any = get_family("ltx_video").load(section).load_vae()
    latents, clip = torch.randn(1, vae.config.latent_channels, 2, 2, 2), torch.rand(1, 3, 9, 64, 64)

    def call(other: torch.dtype) -> list[Tensor]:
        return [vae.decode(latents.to(other)).sample, vae.encode(clip.to(other)).latent_dist.parameters]

    with torch.no_grad():
        with in_vae_dtype(vae):
            inside = call(torch.float32 if dtype == "bf16" else torch.bfloat16)
        clip, latents = clip.bfloat16(), latents.bfloat16()
        alone = call(vae.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            usual = call(vae.dtype)
            with in_vae_dtype(vae):
                under_autocast = call(vae.dtype)
    assert all(map(torch.equal, inside, alone))
    # Those in bf16 are as before, with norms in fp32 under autocast.
    assert all(map(torch.equal, under_autocast, alone if dtype == "fp32" else usual))
    assert dtype == "bf16" or not any(map(torch.equal, usual, alone))
    assert not {"encode", "decode"} & set(vars(vae))
