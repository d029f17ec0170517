"""Pixels as inputs of a VAE: 8 bits each until they are encoded, a few frames at a time."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

#: Frames that are converted at a time.
_FRAMES_AT_ONCE = 8

#: Tensors of an encoded clip: the VAE's moments of all frames, and of the first one alone.
MOMENTS, FIRST_FRAME = "moments", "first_frame_moments"


def to_unit_range(
    video_BCTHW: Tensor, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Convert videos of 8-bit pixels, 0 to 255, or already in [-1, 1], to [-1, 1], on a device and in a dtype.

    They are computed in fp32, a few frames at a time: until then pixels have 8 bits.
    """
    if video_BCTHW.is_floating_point():
        return video_BCTHW.to(device, dtype)
    unit = torch.empty(video_BCTHW.shape, dtype=dtype, device=device or video_BCTHW.device)
    for pixels, target in zip(
        video_BCTHW.split(_FRAMES_AT_ONCE, dim=2), unit.split(_FRAMES_AT_ONCE, dim=2), strict=True
    ):
        target.copy_(pixels.to(unit.device, non_blocking=True).to(torch.float32).div_(127.5).sub_(1.0))
    return unit


def encode_moments(vae: Any, video_BCTHW: Tensor) -> Tensor:
    """Encode videos to VAE moments; where the VAE slices, clips are converted and encoded one by one."""
    device, parts = next(vae.parameters()).device, video_BCTHW.split(1 if vae.use_slicing else len(video_BCTHW))
    with torch.no_grad():
        encoded = [
            vae.encode(to_unit_range(part, device=device, dtype=vae.dtype)).latent_dist.parameters for part in parts
        ]
    return encoded[0] if len(encoded) == 1 else torch.cat(encoded)


def pixel_size(latents_BCTHW: Tensor, *, temporal: int, spatial: int) -> tuple[int, int, int]:
    """Return frames, height and width of decoded clips, from frames per latent frame and pixels per latent cell."""
    frames, height, width = latents_BCTHW.shape[2:]
    return (frames - 1) * temporal + 1, height * spatial, width * spatial


def to_pil(image_CHW: Tensor) -> Image.Image:
    """Return an image as users of a pipeline give it, from 8-bit pixels or from [-1, 1]."""
    if image_CHW.is_floating_point():
        image_CHW = (image_CHW.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(image_CHW.permute(1, 2, 0).cpu().numpy())
