"""Rewards for motion: its amount (optical flow), smoothness and absence of flicker. No weights.

The obvious measure of motion, the mean difference of neighboring frames, is as large for flicker, noise and cuts as for
things that move, so a model trained on it learns to flicker. The obvious measure of smoothness, the second difference
of pixel values over time, is as large for a sharp edge that glides evenly as for one that jumps back and forth. So both
use optical flow: the position of each point of a frame in the next one, as far as the two look alike.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .pixels import VideoReward, luma

_SIDE = 64  # pixels of the shorter side of the frames that flow is computed on
_LEVELS = 4  # of the pyramid; the coarsest has a shorter side of 8 pixels
_ITERATIONS = 4  # a level
_WINDOW = 9  # pixels in each direction that a point's flow is fitted to
#: Variance of luma in [0, 1] within a window below which it fades into a flat surface: six grey levels of 255.
_FLAT = (6 / 255) ** 2
#: Added to squared gradients and products of textures, which are about 1, so that flat surfaces do not move.
_RIDGE = 0.05
#: Mean motion a frame, in shorter sides of the frame, far below which a clip stands still.
_STILL = 1e-4


class Motion(VideoReward):
    """Amount of motion: mean speed of all points of all frames, in shorter sides of the frame per second.

    If a tenth of the frame moves by half the frame's height in a second, that is 0.05. The speed of a point is
    weighted by the likeness of its surroundings in both frames, so flicker counts nothing, noise and cuts little.
    Speeds are measured up to about an eighth of the shorter side a frame; faster motion counts as less.
    """

    min_frames = 2

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor:
        """See `VideoReward.clip`.

        Raises:
            ValueError: there is a single frame.
        """
        return flow(_frames(video, min_frames=self.min_frames)).norm(dim=1).mean() * fps


class Smoothness(VideoReward):
    """Smoothness of motion: minus the mean change of velocity, relative to the velocity; in [-1, 0].

    With v the displacement of a point to the next frame and v' its displacement from there to the one after, the second
    difference v' - v is set against the first: `-(mean |v' - v| + e) / (mean (|v'| + |v|) + e)`. Even motion gives
    nearly 0 at any speed; motion back and forth gives -1. A still clip also gives -1, since only `e`, a ten-thousandth
    of the frame's shorter side, remains: a frozen clip must not be rewarded. Points that leave the frame are not
    counted.
    """

    min_frames = 3

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor:
        """See `VideoReward.clip`.

        Raises:
            ValueError: there are fewer than three frames.
        """
        displacement = flow(_frames(video, min_frames=self.min_frames))
        first, second = displacement[:-1], displacement[1:]
        pixels = first * min(first.shape[-2:])
        next_displacement, inside = warp(second, pixels)
        change = ((next_displacement - first).norm(dim=1) * inside).mean()
        length = ((next_displacement.norm(dim=1) + first.norm(dim=1)) * inside).mean()
        return -(change + _STILL) / (length + _STILL)


class Steadiness(VideoReward):
    """Absence of flicker: 1 - mean absolute difference of neighboring frames, in [0, 1].

    This is VBench's temporal flickering (arXiv:2311.17982), (255 - mean |f_t - f_t+1|) / 255 over all channels. A
    frozen clip has the best score, so use it together with a reward for motion.
    """

    min_frames = 2

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor:
        """See `VideoReward.clip`.

        Raises:
            ValueError: there is a single frame.
        """
        frames = _frames(video, min_frames=self.min_frames)
        return 1 - (frames[1:] - frames[:-1]).abs().mean()


# ---- optical flow --------------------------------------------------------------------------------------------------


def flow(video: Tensor) -> Tensor:
    """Return the optical flow: the displacement of each point to the next frame, in shorter sides of the frame.

    Lucas and Kanade's method (1981) on a pyramid of small grey frames: the displacement of a window is the
    least-squares solution of `gradient * displacement = difference`. It is multiplied by the likeness of the windows at
    both of its ends: 0 at half of full correlation and below, which noise does not exceed, 1 at full.

    Args:
        video: `[T, 3, H, W]` in [0, 1].

    Returns:
        `[T - 1, 2, h, w]`, x before y, on frames whose shorter side has at most 64 pixels.
    """
    grey = luma(video)[:, None]
    factor = max(1.0, min(grey.shape[-2:]) / _SIDE)
    pyramid = [_resize(grey, [round(side / factor) for side in grey.shape[-2:]])]
    while len(pyramid) < _LEVELS and min(pyramid[-1].shape[-2:]) >= 16:
        pyramid.append(_resize(pyramid[-1], [side // 2 for side in pyramid[-1].shape[-2:]]))
    displacement = grey.new_zeros(len(grey) - 1, 2, *pyramid[-1].shape[-2:])
    for level in reversed(pyramid):
        texture = _texture(level)
        displacement = _enlarge(displacement, level.shape[-2:])
        for _ in range(_ITERATIONS):
            displacement = _gauss_newton_step(displacement, texture[:-1], texture[1:])
    return displacement * _likeness(displacement, texture[:-1], texture[1:]) / min(texture.shape[-2:])


def warp(images: Tensor, displacement: Tensor) -> tuple[Tensor, Tensor]:
    """Return images `[N, C, h, w]` read at displaced points, and whether these are inside, `[N, h, w]`.

    Args:
        images: to read.
        displacement: `[N, 2, h, w]` in pixels, x before y.
    """
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device) + displacement[:, 0]
    y = torch.arange(height, device=images.device)[:, None] + displacement[:, 1]
    size = displacement.new_tensor([max(width - 1, 1), max(height - 1, 1)])
    grid = torch.stack([x, y], dim=-1) / size * 2 - 1
    read = functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=True)
    inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
    return read, inside


def _texture(grey: Tensor) -> Tensor:
    """Return grey frames `[T, 1, h, w]` less their local mean, over their local contrast.

    Flicker and shade do not change this.
    """
    detail = grey - _window_mean(grey)
    return detail / (_window_mean(detail**2) + _FLAT).sqrt()


def _gauss_newton_step(displacement: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return displacements `[N, 2, h, w]` between images `[N, 1, h, w]` after one Gauss-Newton step."""
    warped, inside = warp(after, displacement)
    gradient_x, gradient_y = _gradient((before + warped) / 2)
    difference = (before - warped) * inside[:, None]
    xx, xy, yy = (
        _window_mean(gradient_x**2) + _RIDGE,
        _window_mean(gradient_x * gradient_y),
        _window_mean(gradient_y**2) + _RIDGE,
    )
    bx, by = _window_mean(gradient_x * difference), _window_mean(gradient_y * difference)
    step = torch.cat([yy * bx - xy * by, xx * by - xy * bx], dim=1) / (xx * yy - xy**2)
    return displacement + step.clamp(-1, 1)  # gradients are linear no further


def _likeness(displacement: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the likeness in [0, 1] of textures `[N, 1, h, w]` around points and displaced points, `[N, 1, h, w]`."""
    warped, _ = warp(after, displacement)
    correlation = _window_mean(before * warped) / (_window_mean(before**2 + warped**2) / 2 + _RIDGE)
    return (2 * correlation - 1).clamp(min=0)


def _gradient(images: Tensor) -> tuple[Tensor, Tensor]:
    padded = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    across = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2
    down = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2
    return across, down


def _window_mean(values: Tensor) -> Tensor:
    """Return the mean over the window around each pixel.

    It is the mean of the means of its columns, which takes a fraction of the additions.
    """
    half = _WINDOW // 2
    columns = functional.avg_pool2d(values, (_WINDOW, 1), stride=1, padding=(half, 0), count_include_pad=False)
    return functional.avg_pool2d(columns, (1, _WINDOW), stride=1, padding=(0, half), count_include_pad=False)


def _enlarge(displacement: Tensor, size: torch.Size) -> Tensor:
    """Return displacements in pixels, on a finer grid."""
    height, width = displacement.shape[-2:]
    finer = functional.interpolate(displacement, size=size, mode="bilinear", align_corners=False)
    return finer * finer.new_tensor([size[1] / width, size[0] / height])[:, None, None]


def _resize(images: Tensor, size: list[int]) -> Tensor:
    return functional.interpolate(images, size=size, mode="area")


def _frames(video: Tensor, *, min_frames: int) -> Tensor:
    if len(video) < min_frames:
        raise ValueError(f"this reward compares frames, so clips need at least {min_frames}; got {len(video)}")
    return video
