"""A color preference to be learned from scores alone: captions that leave the choice between two colors, one preferred.

The demo model has read "a red circle" and "a blue circle", never "a red or blue circle", and mixes the two. The reward
prefers red where the choice is between red and blue, and cyan where it is between cyan and orange. Red and cyan are
opposites: the color that a clip must get depends on its caption, and no drift of all clips to one side earns anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch
from torch import Tensor

from finetrainers.rewards.pixels import to_uint8

from .verify import Reading, chroma, matches, read
from .world import COLORS, caption, draw_scene

#: The preferred color, and the other one that a caption names.
CHOICES = {"red": "blue", "cyan": "orange"}
_INSIDE = 0.05  # share of a frame's pixels, the most colorful ones, that represent the shape
_FARTHEST = 3**0.5 * 255


def similarity(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the similarity of the shape's color to the preferred one, `[B]` in [0, 1].

    Clips are `[B, T, C, H, W]` in [0, 1].

    1 - distance of the shape's median color to the preferred one / the largest RGB distance, mean over the frames. Even
    clips of the wrong color differ in it, so that there is something to climb.

    Raises:
        ValueError: a prompt does not name exactly one preferred color.
    """
    pairs = [(video, preferred(prompt)) for video, prompt in zip(videos, prompts, strict=True)]
    if torch.is_grad_enabled() and videos.requires_grad:
        return torch.stack([_differentiable_similarity(*pair) for pair in pairs])
    return torch.tensor([_similarity(*pair) for pair in pairs])


similarity.differentiable = True  # type: ignore[attr-defined]


def shown(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return 1 for clips `[B, T, C, H, W]` in [0, 1] whose shape is read as having the preferred color, else 0, `[B]`.

    Raises:
        ValueError: a prompt does not name exactly one preferred color.
    """
    return torch.tensor([float(read(_frames(v)).color == preferred(p)) for v, p in zip(videos, prompts, strict=True)])


def preferred(prompt: str) -> str:
    """Return the preferred color that a prompt names.

    Raises:
        ValueError: it names none, or several.
    """
    colors = [word for word in re.findall(r"[a-z]+", prompt.lower()) if word in CHOICES]
    if len(colors) != 1:
        raise ValueError(f"the prompt {prompt!r} must name one of: {', '.join(CHOICES)}")
    return colors[0]


def choice_captions(items: int, *, name: str, held_out: bool) -> list[str]:
    """Return different captions that leave a choice, the preferred color first in about half of them.

    Args:
        items: number of captions.
        name: of the set; other names draw other scenes.
        held_out: whether to use combinations of the preferred color, shape and motion that the demo model was not
            trained on.
    """
    captions: dict[str, None] = {}  # in order, and no caption twice
    for index in count():
        if len(captions) == items:
            break
        best = list(CHOICES)[index % len(CHOICES)]
        scene = draw_scene(name, "choice", index, held_out=held_out, colors=(best,))
        pair = (best, CHOICES[best]) if index // len(CHOICES) % 2 else (CHOICES[best], best)
        captions[caption(scene, phrasing=index, color=" or ".join(pair))] = None
    return list(captions)


def rest_shown(reading: Reading, prompt: str) -> float:
    """Return the share of the prompt's attributes except the color that a clip shows."""
    rest = {name: value for name, value in matches(reading, prompt).items() if name != "color"}
    return sum(rest.values()) / len(rest)


def _frames(video: Tensor) -> np.ndarray:
    return to_uint8(video).numpy()


def _similarity(clip: Tensor, color: str) -> float:
    target = np.array(COLORS[color], dtype=np.float64)
    medians = [np.median(image[_inside(image)], axis=0) for image in _frames(clip)]
    return float(np.mean([1 - np.linalg.norm(median - target) / _FARTHEST for median in medians]))


def _differentiable_similarity(clip: Tensor, color: str) -> Tensor:
    """Return `_similarity` of pixels `[T, 3, H, W]` in [0, 1], with a graph.

    The gradient is that of the mean color of the shape's pixels: their median depends on a single pixel.
    """
    target = torch.tensor(COLORS[color], dtype=clip.dtype, device=clip.device)
    medians = []
    for image, pixels in zip(_frames(clip.detach()), clip, strict=True):
        chosen = pixels[:, torch.from_numpy(_inside(image)).to(clip.device)] * 255
        median, mean = chosen.detach().quantile(0.5, dim=1), chosen.mean(dim=1)
        medians.append(median + (mean - mean.detach()))
    return 1 - (torch.stack(medians) - target).norm(dim=1).mean() / _FARTHEST


def _inside(image: np.ndarray) -> np.ndarray:
    """Return which pixels of `[H, W, 3]` are the most colorful ones, `[H, W]`."""
    colorful = chroma(image)
    return colorful >= np.quantile(colorful, 1 - _INSIDE)
