"""Decoding of latents into videos, and the gradient of a score of the pixels with respect to the latents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .batch import VAEStats
from .pixels import pixel_size
from .tiling import calls_through, retry_vae_on_oom

T = TypeVar("T")


def decode_videos(spec: Any, vae: Any, latents_BCTHW: Tensor, vae_stats: VAEStats) -> Tensor:
    """Implement `ModelSpec.decode`."""
    with retry_vae_on_oom(spec, vae, _size(spec, latents_BCTHW), batch=len(latents_BCTHW)):
        return _pixels(spec, vae, latents_BCTHW, vae_stats)


@contextmanager
def in_vae_dtype(vae: Any) -> Iterator[None]:
    """Let a pipeline's calls of the VAE take inputs of any dtype in the block, and be in fp32 if its weights are.

    Under autocast its convolutions would compute in 16 bits, unlike those that encode clips and decode rollouts.
    """

    def call(method: Callable[..., T], x: Tensor, *args: Any, **kwargs: Any) -> T:
        with torch.autocast(x.device.type, enabled=False) if vae.dtype == torch.float32 else nullcontext():
            return method(x.to(vae.dtype), *args, **kwargs)

    with calls_through(vae, call):
        yield


def decode_gradient(
    spec: Any,
    vae: Any,
    latents_BCTHW: Tensor,
    vae_stats: VAEStats,
    score: Callable[[Tensor], tuple[Tensor, T]],
    *,
    checkpointing: bool,
) -> tuple[Tensor, T]:
    """Return the gradient of a score of decoded videos with respect to normalized latents.

    Videos are decoded and scored, and the score is backpropagated. On OOM it is repeated clip by clip, then in tiles,
    as decoding alone is.

    Args:
        spec: spec of the model.
        vae: frozen, on its device.
        latents_BCTHW: latents without the frames that `padded` adds.
        vae_stats: normalization constants of the VAE.
        score: returns the score of videos `[B, 3, T, H, W]` in [0, 1] with a graph, and any other result.
        checkpointing: recompute the decoder in backward, block by block, and tile by tile where it works on tiles.

    Returns:
        The gradient, fp32, and the rest that `score` returned.
    """

    def work() -> tuple[Tensor, T]:
        z = latents_BCTHW.detach().float().requires_grad_()
        with torch.enable_grad():
            total, rest = score(_pixels(spec, vae, z, vae_stats))
            # It has no graph where no clip has a score.
            (gradient,) = torch.autograd.grad(total, z) if total.requires_grad else (torch.zeros_like(z),)
        return gradient.detach(), rest

    with retry_vae_on_oom(spec, vae, _size(spec, latents_BCTHW), batch=len(latents_BCTHW), gradient=True) as retry:
        if not checkpointing:
            return retry(work)
        with spec.recompute_decoder(vae):
            return retry(work)


def _pixels(spec: Any, vae: Any, latents: Tensor, vae_stats: VAEStats) -> Tensor:
    z = vae_stats.denormalize(latents).to(next(vae.parameters()).device, vae.dtype)
    return (spec.decode_latents(vae, z).float() / 2 + 0.5).clamp(0.0, 1.0)


def _size(spec: Any, latents: Tensor) -> tuple[int, int, int]:
    geometry = spec.facts.geometry
    return pixel_size(latents, temporal=geometry.temporal, spatial=geometry.spatial)


@contextmanager
def recompute_decoder(vae: Any) -> Iterator[None]:
    """Implement `ModelSpec.recompute_decoder`: calls store their inputs, and blocks theirs during recomputation.

    A decoder that is called once for each tile, or for a few frames at a time, then has the activations of one call.
    """
    decoder = vae.decoder
    blocks = getattr(vae, "_supports_gradient_checkpointing", False) and not vae.is_gradient_checkpointing
    if blocks:
        vae.enable_gradient_checkpointing()
    decoder.forward = _checkpointed(decoder.forward)
    try:
        yield
    finally:
        del decoder.forward
        if blocks:
            vae.disable_gradient_checkpointing()


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward that is computed again in backward, with the lists among its arguments as they were at the call.

    Decoders with a feature cache write to them (`AutoencoderKLWan`).
    """

    def call(*args: Any, **kwargs: Any) -> Tensor:
        lists = {name: list(value) for name, value in kwargs.items() if isinstance(value, list)}
        is_again = False

        def run(*args: Any) -> Tensor:
            nonlocal is_again
            copies = {name: list(value) for name, value in lists.items()} if is_again else {}
            is_again = True
            return forward(*args, **{**kwargs, **copies})

        return checkpoint(run, *args, use_reentrant=False)

    return call
