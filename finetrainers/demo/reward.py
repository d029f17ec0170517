"""The demo world's verifiers as a reward: `--reward demo.all`, or one attribute, `--reward demo.color`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from finetrainers.rewards.base import Head, Reward
from finetrainers.rewards.pixels import to_uint8

from .verify import has_speed, matches, read, share_shown


class DemoWorld(Reward):
    """Reward for clips that show the attributes of their captions, read back from the pixels.

    Heads:
        all: share of color, shape, motion, background and look, as far as the caption names them, that is visible.
        color, shape, motion, background, look: 1 if it is visible, else 0.
        speed: 1 if the shape moves as requested, at the speed nearest to the requested one, else 0. Not part of `all`:
            a shape that moves too slowly still does what it should.

    An attribute that a caption does not name cannot be wrong: its head is 1 for every clip, so that clips of one
    caption do not differ in it and it teaches nothing.
    """

    heads: ClassVar[Mapping[str, Head]] = {
        name: Head() for name in ("all", "color", "shape", "motion", "background", "look", "speed")
    }

    @torch.no_grad()
    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """Score clips; see `Reward.score`.

        Raises:
            ValueError: a prompt names nothing of the demo world, or clips have a single frame.
        """
        if videos.shape[1] < 2:
            raise ValueError("the demo reward reads motion, so clips need at least 2 frames")
        rows = [_scores(clip, prompt) for clip, prompt in zip(videos, prompts, strict=True)]
        return {name: torch.tensor([row[name] for row in rows], dtype=torch.float32) for name in self.heads}


def _scores(clip: Tensor, prompt: str) -> dict[str, float]:
    """Return all heads of one clip `[T, 3, H, W]` in [0, 1]."""
    reading = read(to_uint8(clip).numpy())
    hits = {**matches(reading, prompt), "speed": has_speed(reading, prompt) is not False}
    return {**{name: float(hits.get(name, True)) for name in DemoWorld.heads}, "all": share_shown(reading, prompt)}
