"""The demo model before training: final VAE, text encoder and tokenizer, and a randomly initialized transformer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline
from torch import Tensor
from transformers import T5TokenizerFast

from finetrainers.models.tiny import ltx_transformer, seeded, t5_encoder
from finetrainers.models.tiny_tokenizers import WORDS, t5_tokenizer

from .clips import real_clips, to_tensor
from .data import FRAMES, held_out_scenes
from .linear_vae import build_linear_vae
from .world import LOOKS, MOTIONS, PHRASINGS, Scene, caption, draw_scene, render

_TEXT_WIDTH = 64
#: High noise levels decide the content of a clip: training and sampling spend more of their steps there.
SHIFT = 3.0
#: Channels of a latent cell, which covers 8x8 pixels and 4 frames, and of the previous stage.
LATENT_CHANNELS, STAGE_CHANNELS = 64, 64
#: Films that the VAE is fitted to, and that its quality is measured on.
FITTED_FILM, OTHER_FILMS = "bigbuckbunny.mp4", ("bikes.mp4", "carphone_pristine.mp4")
_WORLD_CLIPS = 200


def build_base(directory: Path) -> None:
    """Write the untrained model in diffusers layout; it is always the same."""
    with seeded(0):
        tokenizer = build_tokenizer()
        # Every word gets a separate vector, colored by its neighbors, and a transformer needs no more to learn the
        # meaning of the words: the text encoder stays random.
        text_encoder = t5_encoder(tokenizer, width=_TEXT_WIDTH)
        transformer = ltx_transformer(LATENT_CHANNELS, heads=3, head_width=64, layers=5, text_width=_TEXT_WIDTH)
    LTXPipeline(
        transformer=transformer,
        vae=build_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    ).save_pretrained(str(directory))


def build_tokenizer() -> T5TokenizerFast:
    """Return a T5 tokenizer in which every word of the world's captions is one token."""
    texts = [caption(scene, phrasing=i) for scene in fitted_scenes() for i in range(PHRASINGS)]
    words = [*WORDS, *(word for text in texts for word in re.findall(r"[a-z]+", text))]
    return t5_tokenizer(words=list(dict.fromkeys(words)), model_max_length=128)


def build_vae() -> AutoencoderKLLTXVideo:
    """Fit the linear code of `linear_vae.py` to the world and to a real film; always the same, in seconds."""
    clips = [to_tensor(render(scene)) for scene in fitted_scenes()]
    clips += real_clips(FITTED_FILM, stride=FRAMES)
    return build_linear_vae(clips, keep=(STAGE_CHANNELS,), latent_channels=LATENT_CHANNELS)


def fitted_scenes() -> list[Scene]:
    """Return scenes that the VAE is fitted to: every motion and look, including those the transformer never sees."""
    return [
        draw_scene("vae", i, held_out=None, motions=tuple(MOTIONS), look=LOOKS[i % 4 == 0]) for i in range(_WORLD_CLIPS)
    ]


def measure_vae(vae: AutoencoderKLLTXVideo, *, clips: int = 50) -> dict[str, float]:
    """Return the mean PSNR in dB of encoding and decoding clips that the VAE was not fitted to.

    There is one for each look of the world, and one for each real film.

    Args:
        vae: the VAE to measure.
        clips: number of clips of the world, for each look.
    """
    psnr = {}
    for look in LOOKS:
        rendered = [to_tensor(render(scene)) for scene in held_out_scenes(clips, look=look)]
        psnr[f"world, {look}"] = _mean_psnr(vae, rendered)
    for film in OTHER_FILMS:
        psnr[film] = _mean_psnr(vae, real_clips(film, stride=20))
    return psnr


@torch.no_grad()
def _mean_psnr(vae: AutoencoderKLLTXVideo, clips: Sequence[Tensor]) -> float:
    values = []
    for clip in clips:
        latents = vae.encode(clip[None].to(vae.dtype)).latent_dist.mode()
        decoded = vae.decode(latents, return_dict=False)[0][0].float().clamp(-1, 1)
        values.append(10 * math.log10(4 / (decoded - clip).square().mean().item()))
    return sum(values) / len(values)
