"""The best and the worst clip of a rollout's first prompt, written with their scores, for people and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetrainers.config.root import TrainConfig
from finetrainers.rewards.reward_set import Scores
from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.video import write_mp4

from .advantage import Advantages
from .prompts import Job

_EVERY = 10  # rollouts, where a tracker shows them


class RolloutKeeper:
    """Writes `step-N/best.mp4`, `worst.mp4` and `scores.json` of some rollouts, N being a rollout's first optimizer step.

    Of one prompt, whose clips are comparable: they often start from the same noise, and advantages compare them alone.
    """

    def __init__(self, config: TrainConfig, parallel: Any, *, fps: float) -> None:
        """Args:
        config: of the run, which says how often.
        parallel: the processes of the run.
        fps: frame rate of the clips.
        """
        asked = config.grpo.keep_rollouts_every
        self.folder = config.run.output_dir / "rollouts"
        self.every = (_EVERY if config.run.report_to != "none" else 0) if asked is None else asked
        self.updates = config.grpo.updates_per_rollout
        self.parallel = parallel
        self.fps = fps

    def wants(self, job: Job) -> bool:
        """Whether a clip may be written."""
        return self.every > 0 and job.rollout % self.every == 0 and job.slot == 0

    def keep(self, jobs: list[Job], videos: Mapping[int, Tensor], scores: Scores, found: Advantages) -> None:
        """Write the clips of a rollout, if it is due; all ranks call it.

        Args:
            jobs: this rank's clips.
            videos: pixels of those that are wanted by index, `[T, H, W, C]` uint8 on the host.
            scores: of all ranks' clips.
            found: their advantages.
        """
        rollout = jobs[0].rollout
        if not self.every or rollout % self.every:
            return
        error = None
        try:
            self._write(self.folder / f"step-{rollout * self.updates + 1:06d}", jobs, videos, scores, found)
        except Exception as caught:
            error = caught
        self.parallel.raise_if_any_failed(error, "writing clips of a rollout")

    def _write(
        self, folder: Path, jobs: list[Job], videos: Mapping[int, Tensor], scores: Scores, found: Advantages
    ) -> None:
        rollout, start = jobs[0].rollout, self.parallel.data_rank * len(jobs)
        values, failed = found.values[0], found.failed[0]
        best = int(values.masked_fill(failed, -torch.inf).argmax())
        worst = int(values.masked_fill(failed, torch.inf).argmin())
        written = {}
        for kind, place in (("best", best), ("worst", worst)):
            raw = {name: float(head.raw[place]) for name, head in scores.heads.items() if head.raw[place].isfinite()}
            written[kind] = {"clip": place, "advantage": float(values[place]), "reward": raw}
            index = place - start  # the clips of the first prompt come first
            if index in videos:
                job = jobs[index]
                numbers = ", ".join(f"{name} {score:.4g}" for name, score in raw.items())
                said = f"rollout {rollout} | {kind} of {len(values)} | advantage {values[place]:+.2f} | {numbers}"
                comment = f"{' '.join(job.prompt.text.split())}\n{said}"
                write_mp4(folder / f"{kind}.mp4", videos[index].numpy(), fps=self.fps, comment=comment)
        if self.parallel.rank == 0:
            write_json_atomic(folder / "scores.json", {"rollout": rollout, "prompt": jobs[0].prompt.text, **written})
