"""Masks of clips: cut like the clips themselves, and pooled to weights of latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..buckets.clip import Clip
from ..reading.status import InvalidSampleError
from .decode import crop, find_cut, read_frames, read_image


def load_mask(clip: Clip, *, generator: torch.Generator) -> Tensor:
    """Return the mask of a clip, pooled to its latents, `[1, 1, T, H, W]` fp32 from 0 to 1.

    Its frames are those of the clip, resized and cropped as `load_clip` does with a generator in the same state. Latent
    0 stands for frame 0, and latent k for frames (k - 1) c + 1 to k c, with c frames to a latent.

    Args:
        clip: a clip that has a mask.
        generator: see `load_clip`.

    Raises:
        InvalidSampleError: the file cannot be decoded.
    """
    mask, cut = clip.mask, find_cut(clip, generator)
    assert mask is not None, "only clips with masks are asked for them"
    height, width = cut.full
    if mask.kind == "image":
        frames = crop(read_image(mask.path, height=height, width=width)[0], cut.box)[None]
    else:
        frames = read_frames(mask.path, cut.indices, height=height, width=width, box=cut.box, backend=mask.backend)
    per_latent, side = mask.grid
    cells = torch.stack([F.avg_pool2d(frame[None, ..., 1].float(), side) for frame in frames], dim=1)
    if len(frames) == 1:
        latents = (clip.bucket[0] - 1) // per_latent + 1
        return (cells / 255).expand(1, latents, -1, -1)[None].contiguous()
    later = cells[:, 1:].unflatten(1, (-1, per_latent)).mean(2)
    return (torch.cat([cells[:, :1], later], dim=1) / 255)[None]


def latent_weights(clip: Clip, pooled: Tensor) -> Tensor:
    """Return the weights of a clip's latents by its pooled mask.

    Raises:
        InvalidSampleError: the mask is black, and the clip is never cut in another way, so that it would never be
            trained.
    """
    assert clip.mask is not None, "only clips with masks are asked for them"
    is_only_cut = clip.start is None and not clip.is_random
    if not clip.mask.lowest and is_only_cut and not pooled.any():
        raise InvalidSampleError(
            f"its mask {clip.mask.path} is black in all trained frames of {clip.path}, within its crop",
            "mismatch",
        )
    return clip.mask.lowest + (1 - clip.mask.lowest) * pooled
