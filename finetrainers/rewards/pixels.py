"""Rewards computed from pixels: brightness, contrast, saturation, color, sharpness, compressibility. No weights.

They are easily exploited, since noise is sharp and grey compresses, so use them for experiments, for tests, and with
small weights next to a learned reward.
"""

from __future__ import annotations

import io
import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from PIL import Image, ImageColor
from pydantic import AfterValidator
from torch import Tensor

from finetrainers.utils.failures import InputError
from finetrainers.utils.text import nearest

from .base import Reward

#: Weights of red, green and blue in luma, Rec. ITU-R BT.601-7, as in JPEG and PIL; of values as stored, not linear.
_REC_601 = (0.299, 0.587, 0.114)
_JPEG_QUALITY = 95
_LONGEST_NAME = 4  # words: "light golden rod yellow"


def luma(video: Tensor) -> Tensor:
    """Return Rec. 601 luma `[T, H, W]` of frames `[T, 3, H, W]`, in their range."""
    return torch.einsum("tchw,c->thw", video, video.new_tensor(_REC_601))


def to_uint8(videos: Tensor) -> Tensor:
    """Return clips `[..., T, C, H, W]` in [0, 1] as bytes with the channels last, `[..., T, H, W, C]`.

    Raises:
        ValueError: a value is not finite, which bytes cannot represent.
    """
    if not videos.isfinite().all():
        raise ValueError("a clip to score has values that are not finite; the model that generated it has diverged")
    return (videos * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).contiguous()


class VideoReward(Reward):
    """A reward with one output that scores one clip at a time, so that a score cannot depend on the batch."""

    differentiable: ClassVar[bool] = True
    #: Numbers that a pixel of a channel takes at the peak of `differentiate` and its backward.
    graph_numbers: ClassVar[float] = 4.0

    def differentiate(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """See `Reward.differentiate`."""
        scores = [self.clip(v, p, fps=fps) for v, p in zip(videos, prompts, strict=True)]
        return {"score": torch.stack(scores)}  # type: ignore[arg-type]

    @classmethod
    def graph_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """See `Reward.graph_bytes`."""
        return 4.0 * 3 * math.prod(size) * clips * cls.graph_numbers

    @torch.no_grad()
    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """See `Reward.score`."""
        # Summation order, and so the last bit, may depend on the memory layout of a tensor: use one layout.
        scores = [float(self.clip(v.contiguous(), p, fps=fps)) for v, p in zip(videos, prompts, strict=True)]
        return {"score": torch.tensor(scores, dtype=torch.float32)}

    @abstractmethod
    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor | float:
        """Return the score of one clip `[T, 3, H, W]` in [0, 1]."""


class Brightness(VideoReward):
    """Mean Rec. 601 luma, in [0, 1]."""

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor:
        """See `VideoReward.clip`."""
        return luma(video).mean()


class Contrast(VideoReward):
    """RMS contrast: standard deviation of the Rec. 601 luma over a frame, mean over the frames; in [0, 0.5]."""

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor:
        """See `VideoReward.clip`."""
        return luma(video).flatten(1).std(dim=1, correction=0).mean()


class Saturation(VideoReward):
    """Mean difference between the largest and the smallest channel of a pixel, in [0, 1]; 0 for grey."""

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor:
        """See `VideoReward.clip`."""
        return (video.amax(dim=1) - video.amin(dim=1)).mean()


class Color(VideoReward):
    """Similarity of all pixels to a color: 1 - mean RGB distance / sqrt(3), in [0, 1]; 1 if all have that color."""

    def __init__(self, *, target: CSSColor = "prompt") -> None:
        """Args:
            target: a color as CSS writes it (`teal`, `#00a0ff`), or `prompt`: the first color that a prompt names.

        Raises:
            ValueError: the color is unknown.
        """
        self.target = None if target == "prompt" else _rgb(target)

    @classmethod
    def prompt_problem(cls, options: Mapping[str, str], prompt: str) -> str | None:
        """See `Reward.prompt_problem`."""
        if options.get("target", "prompt") != "prompt":
            return None
        try:
            color_in(prompt)
        except ValueError as error:
            return str(error)
        return None

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor:
        """See `VideoReward.clip`.

        Raises:
            ValueError: the color is to come from the prompt, which names none.
        """
        target = _rgb(color_in(prompt)) if self.target is None else self.target
        return 1 - (video - target.to(video.device)[:, None, None]).norm(dim=1).mean() / 3**0.5


def color_in(prompt: str) -> str:
    """Return the first CSS color name in a text: `lightblue` for "a light blue sea under red sky".

    A name may have several words. Names of things also count, as in "a snow leopard": CSS has `snow`, `tan`, `salmon`,
    `chocolate` and more.

    Raises:
        ValueError: the text has no color name.
    """
    words = re.findall(r"[a-z]+", prompt.lower())
    for start in range(len(words)):
        for count in range(_LONGEST_NAME, 0, -1):
            name = "".join(words[start : start + count])
            if name in ImageColor.colormap:
                return name
    message = f"the prompt {prompt!r} names no CSS color; name one, or set a fixed target=COLOR for the reward"
    raise InputError(message, "required")


class Sharpness(VideoReward):
    """Variance of the Laplacian of the Rec. 601 luma, on the scale 0..255, mean over the frames.

    The Laplacian is the sum of a pixel's four neighbors less four times itself, where it has all four. Noise raises it.
    """

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> Tensor:
        """See `VideoReward.clip`.

        Raises:
            ValueError: frames have no inner pixels.
        """
        y = luma(video) * 255
        if min(y.shape[1:]) < 3:
            raise ValueError(f"sharpness requires frames of at least 3x3 pixels, got {y.shape[1]}x{y.shape[2]}")
        inner = y[:, 1:-1, 1:-1]
        laplacian = y[:, :-2, 1:-1] + y[:, 2:, 1:-1] + y[:, 1:-1, :-2] + y[:, 1:-1, 2:] - 4 * inner
        return laplacian.flatten(1).var(dim=1, correction=0).mean()


class Incompressibility(VideoReward):
    """Mean size of a frame as a JPEG of quality 95, in kB (1000 bytes); DDPO, arXiv:2305.13301, section 5.

    The number grows with the frame size and depends a little on the libjpeg behind PIL.
    """

    differentiable = False

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> float:
        """See `VideoReward.clip`."""
        return jpeg_kilobytes(video)


class Compressibility(VideoReward):
    """Minus the `Incompressibility`."""

    differentiable = False

    def clip(self, video: Tensor, prompt: str, *, fps: float) -> float:
        """See `VideoReward.clip`."""
        return -jpeg_kilobytes(video)


def jpeg_kilobytes(video: Tensor) -> float:
    """Return the mean size of the frames of a clip `[T, 3, H, W]` in [0, 1] as JPEG, in units of 1000 bytes."""
    sizes = []
    for frame in to_uint8(video).numpy():
        file = io.BytesIO()
        Image.fromarray(frame).save(file, format="JPEG", quality=_JPEG_QUALITY)
        sizes.append(file.tell())
    return sum(sizes) / len(sizes) / 1000


def _check_color(color: str) -> str:
    """Return the color if it is `prompt` or a CSS color."""
    if color != "prompt":
        _rgb(color)
    return color


#: Option with a color.
CSSColor = Annotated[str, AfterValidator(_check_color)]


def _rgb(color: str) -> Tensor:
    try:
        rgb = ImageColor.getrgb(color)[:3]
    except ValueError:
        hint = nearest(color, [*ImageColor.colormap, "prompt"])
        raise InputError(f"target={color!r} must be a CSS color name, #rrggbb or 'prompt'{hint}", "unknown") from None
    return torch.tensor(rgb, dtype=torch.float32) / 255
