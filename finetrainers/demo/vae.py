"""The embedded model's VAE: the linear code of `linear_vae.py`, fitted to the little world and to a real film."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLLTXVideo
from torch import Tensor

from .clips import real_clips, to_tensor
from .data import FRAMES, HEIGHT, WIDTH, held_out_scenes
from .linear_vae import build_linear_vae
from .world import LOOKS, MOTIONS, Scene, draw_scene, render

#: Channels of a latent cell, which covers 8x8 pixels and 4 frames, and of the stage before.
LATENT_CHANNELS, STAGE_CHANNELS = 64, 64
#: Films that the VAE is fitted to, and that its quality is measured on.
FITTED_FILM, OTHER_FILMS = "bigbuckbunny.mp4", ("bikes.mp4", "carphone_pristine.mp4")
_WORLD_CLIPS = 200


def build_vae() -> AutoencoderKLLTXVideo:
    """Fit it; takes seconds and gives the same weights every time."""
    clips = [to_tensor(render(scene)) for scene in fitted_scenes()]
    clips += real_clips(FITTED_FILM, frames=FRAMES, height=HEIGHT, width=WIDTH, stride=FRAMES)
    return build_linear_vae(clips, keep=(STAGE_CHANNELS,), latent_channels=LATENT_CHANNELS)


def fitted_scenes() -> list[Scene]:
    """Scenes of the world that the VAE is fitted to: every motion and look, what the transformer never sees included."""
    return [
        draw_scene("vae", i, held_out=None, motions=tuple(MOTIONS), look=LOOKS[i % 4 == 0]) for i in range(_WORLD_CLIPS)
    ]


def measure_vae(vae: AutoencoderKLLTXVideo, *, clips: int = 50) -> dict[str, float]:
    """Mean PSNR in dB of encoding and decoding clips that it was not fitted to: of the world, by look, and of real films.

    Args:
        vae: what is measured.
        clips: how many of the world, of each look.
    """
    found = {}
    for look in LOOKS:
        rendered = [to_tensor(render(scene)) for scene in held_out_scenes(clips, look=look)]
        found[f"world, {look}"] = _mean_psnr(vae, rendered)
    for film in OTHER_FILMS:
        found[film] = _mean_psnr(vae, real_clips(film, frames=FRAMES, height=HEIGHT, width=WIDTH, stride=20))
    return found


@torch.no_grad()
def _mean_psnr(vae: AutoencoderKLLTXVideo, clips: Sequence[Tensor]) -> float:
    values = []
    for clip in clips:
        latents = vae.encode(clip[None].to(vae.dtype)).latent_dist.mode()
        decoded = vae.decode(latents, return_dict=False)[0][0].float().clamp(-1, 1)
        values.append(10 * math.log10(4 / (decoded - clip).square().mean().item()))
    return sum(values) / len(values)
