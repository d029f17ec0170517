"""Preprocessing of frames for image networks: selected, as bytes, resized without torchvision, normalized."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate

#: Number of scored frames of a clip.
Frames = Annotated[int, Field(ge=1)]

#: Mean and deviation of red, green and blue that CLIP, and with it Qwen2-VL, were trained with.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def spread_indices(total: int, count: int) -> Tensor:
    """Return indices of `count` frames, evenly spaced from first to last: the first for one, all if there are no more.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"{count} frames cannot be scored")
    return torch.linspace(0, total - 1, min(count, total)).round().long()


def to_bytes(frames: Tensor) -> Tensor:
    """Quantize frames in [0, 1] to bytes, as an image file would hold them."""
    return (frames * 255).round().clamp(0, 255).to(torch.uint8)


def resize_as_torchvision(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize bytes `[N, 3, H, W]` as torchvision does: bicubic, antialiased, in fp32, rounded to bytes."""
    return interpolate(frames.float(), size=size, mode="bicubic", antialias=True).clamp(0, 255).round().to(torch.uint8)


def resize_as_pil(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize bytes `[N, 3, H, W]` as PIL does: bicubic, antialiased, in fixed point; some bytes differ by one.

    Floating point in [0, 255] is not rounded, so that gradients pass.
    """
    resized = interpolate(frames, size=size, mode="bicubic", antialias=True)
    return resized.clamp(0, 255) if frames.is_floating_point() else resized


def normalize_rgb(frames: Tensor) -> Tensor:
    """Normalize frames `[..., 3, H, W]` in [0, 255] with CLIP's mean and deviation, in fp32."""
    mean, std = (torch.tensor(values, device=frames.device).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    return (frames.float() / 255 - mean) / std
