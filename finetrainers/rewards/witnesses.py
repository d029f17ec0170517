"""Witnesses of reward hacking: a few rewards without weights that score some clips of each prompt of a rollout."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from finetrainers.parallel.ranks import DistributedContext

from .pixels import VideoReward
from .registry import make_reward

logger = logging.getLogger(__name__)

_FRAMES = 9  # of a clip, from its middle
_SIDE = 128  # pixels to which the shorter side of frames is averaged, at most twice as many


class Witnesses:
    """Scores of the first clips of each prompt of a rollout by the witnesses. Clips differ more between prompts.

    Their cost does not grow with the size of clips: at most nine consecutive frames of each are scored, averaged over
    squares of pixels to a shorter side below 256. A witness that fails is left out from then on.
    """

    def __init__(
        self, names: Sequence[str], parallel: DistributedContext, *, group: int, fps: float, scored: int = 1
    ) -> None:
        """Args:
        names: of the rewards.
        parallel: the processes of the run.
        group: clips of a prompt, which follow each other.
        fps: frame rate at which the clips play.
        scored: clips of each prompt that are scored.
        """
        self._rewards = {name: make_reward(name, {}) for name in names}
        self._parallel, self._group, self._fps, self._scored = parallel, group, fps, scored
        self._is_used = bool(names)
        self._rows: dict[int, dict[str, float]] = {}  # scores of this process's clips of a rollout, by number

    @torch.no_grad()
    def add(self, videos: Tensor, first_clip: int) -> None:
        """Score some clips.

        Args:
            videos: `[B, T, C, H, W]` in [0, 1], on the CPU.
            first_clip: number of the first of them within the rollout.
        """
        for number, video in enumerate(videos, start=first_clip):
            if number % self._group < self._scored and self._rewards:
                self._rows[number] = self._score(reduced(video))

    def _score(self, video: Tensor) -> dict[str, float]:
        scores = {}
        for name, reward in list(self._rewards.items()):
            assert isinstance(reward, VideoReward)
            try:
                scores[name] = float(reward.clip(video, "", fps=self._fps))
            except Exception as error:  # such as frames that are too small; the run does not depend on it
                logger.warning("witness %s failed; disabled for the rest of this run: %r", name, error)
                del self._rewards[name]
        return scores

    def stats(self) -> dict[str, float]:
        """Return mean and population standard deviation over the prompts of a rollout; all ranks call it together.

        A prompt has the mean of its clips.
        """
        if not self._is_used:
            return {}
        rows, self._rows = dict(self._parallel.gather_objects(list(self._rows.items()))), {}
        stats = {}
        for name in dict.fromkeys(name for number in sorted(rows) for name in rows[number]):
            by_prompt: dict[int, list[float]] = {}
            for number, row in sorted(rows.items()):
                if math.isfinite(row.get(name, math.nan)):
                    by_prompt.setdefault(number // self._group, []).append(row[name])
            scores = [math.fsum(clips) / len(clips) for clips in by_prompt.values()]
            if scores:
                mean = math.fsum(scores) / len(scores)
                stats[f"witness/{name}"] = mean
                stats[f"witness_std/{name}"] = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / len(scores))
        return stats


def reduced(video: Tensor) -> Tensor:
    """Return at most nine frames from the middle of a clip `[T, C, H, W]`, small enough for a witness."""
    start = max(0, (len(video) - _FRAMES) // 2)
    frames = video[start : start + _FRAMES].float()
    factor = min(frames.shape[-2:]) // _SIDE
    return (avg_pool2d(frames, factor) if factor > 1 else frames).contiguous()
