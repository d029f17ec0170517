"""The files that DanceGRPO's trainer writes, for scripts: scores by rollout, and the clips of the last one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from finetrainers.config.root import TrainConfig
from finetrainers.rewards.pixels import to_uint8
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.reading import read_text
from finetrainers.utils.video import write_mp4

from ..prompts.prompts import RolloutSample

logger = logging.getLogger(__name__)

#: Files of scores and the metrics that they hold; a metric may have options after its name.
_SCORES = {"vq_reward": "reward_normalized/videoalign.vq", "mq_reward": "reward_normalized/videoalign.mq"}


class DanceGRPOFiles:
    """A writer of `vq_reward.txt`, `mq_reward.txt` and `videos/PREFIX_{rank}_{prompt}.mp4` into the run directory."""

    def __init__(self, config: TrainConfig, parallel: Any, *, fps: float) -> None:
        """Args:
        config: the run.
        parallel: the processes of the run.
        fps: frame rate of the clips; DanceGRPO's is that at which they are scored.
        """
        self.folder = config.run.output_dir
        self.prefix = config.model.model_name.partition("_")[0]
        self.parallel = parallel
        self.fps = fps

    def clips(self, jobs: Sequence[RolloutSample], first: int, videos: Tensor) -> None:
        """Write the first clip of each prompt, if it is among `videos`. Processes that share clips write some each.

        Args:
            jobs: all clips of this process in the rollout.
            first: index of the first clip in `videos`.
            videos: `[B, T, C, H, W]` in [0, 1].
        """
        rank = self.parallel.data_rank * self.parallel.sharing  # the first process of those that share the clips
        for index, video in enumerate(videos, start=first):
            prompt = jobs[index].slot - jobs[0].slot
            if index == 0 or jobs[index - 1].slot != jobs[index].slot:
                path = self.folder / "videos" / f"{self.prefix}_{rank}_{prompt}.mp4"
                write_mp4(path, to_uint8(video).numpy(), fps=self.fps, comment=jobs[index].prompt.text)

    def scores(self, rollout: int, stats: Mapping[str, float]) -> None:
        """Write the mean scores of a rollout as its line; lines of rollouts that are sampled again are replaced."""
        if self.parallel.rank != 0:
            return
        messages = []
        for name, metric in _SCORES.items():
            values = [value for key, value in stats.items() if key == metric or key.startswith(f"{metric},")]
            path = self.folder / f"{name}.txt"
            if not values and not path.is_file():
                continue  # this run does not have the reward
            lines = read_text(path).splitlines() if rollout and path.is_file() else []
            lines += ["nan"] * (rollout - len(lines))  # rollouts before this file was requested
            value = values[0] if values else math.nan
            write_text_atomic(path, "".join(f"{line}\n" for line in [*lines[:rollout], f"{value:.6g}"]))
            messages.append(f"{name} {value:.4f}")
        if messages:
            logger.info("rollout %d: %s", rollout, ", ".join(messages))
