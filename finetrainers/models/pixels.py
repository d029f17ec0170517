"""Pixels on their way into a VAE: 8 bits each until they are encoded, a few frames at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Frames that are converted at a time.
_FRAMES_AT_ONCE = 8

#: Tensors of an encoded clip: the VAE's moments of all frames, and of the first one alone.
MOMENTS, FIRST_FRAME = "moments", "first_frame_moments"


def to_unit_range(
    video_BCTHW: Tensor, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Videos in [-1, 1], of pixels of 0 to 255 with 8 bits or of such already, on a device and in a dtype.

    They are computed in fp32, of a few frames at a time: until then pixels have 8 bits.
    """
    if video_BCTHW.is_floating_point():
        return video_BCTHW.to(device, dtype)
    unit = torch.empty(video_BCTHW.shape, dtype=dtype, device=device or video_BCTHW.device)
    for pixels, place in zip(
        video_BCTHW.split(_FRAMES_AT_ONCE, dim=2), unit.split(_FRAMES_AT_ONCE, dim=2), strict=True
    ):
        place.copy_(pixels.to(unit.device, non_blocking=True).to(torch.float32).div_(127.5).sub_(1.0))
    return unit


def encode_moments(vae: Any, video_BCTHW: Tensor) -> Tensor:
    """VAE moments of videos; what is encoded by itself, a clip where the VAE slices, is converted by itself."""
    device, parts = next(vae.parameters()).device, video_BCTHW.split(1 if vae.use_slicing else len(video_BCTHW))
    with torch.no_grad():
        encoded = [
            vae.encode(to_unit_range(part, device=device, dtype=vae.dtype)).latent_dist.parameters for part in parts
        ]
    return encoded[0] if len(encoded) == 1 else torch.cat(encoded)
