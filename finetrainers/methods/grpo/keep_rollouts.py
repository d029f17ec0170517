"""The best and the worst clips of a rollout's first prompt, in all and by each reward, with their scores, for people and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetrainers.config.root import TrainConfig
from finetrainers.rewards.reward_set import Scores
from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.video import slug, write_mp4

from .advantage import Advantages
from .prompts import Job

_EVERY = 10  # rollouts, where a tracker shows them


class RolloutKeeper:
    """Writes `step-N/best.mp4`, `worst.mp4` and `scores.json` of some rollouts, N being a rollout's first optimizer step.

    With several rewards also `best-REWARD.mp4` and `worst-REWARD.mp4`, unless that clip has been written.

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
        self.every = (_EVERY if config.run.report_to else 0) if asked is None else asked
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
        start, count = self.parallel.data_rank * len(jobs), found.values.shape[1]
        by_head = {name: head.raw[:count] for name, head in scores.heads.items()} if len(scores.heads) > 1 else {}
        chosen = {"": _extremes(found.values[0], found.failed[0])}
        chosen |= {name: _extremes(raw, found.failed[0] | ~raw.isfinite()) for name, raw in by_head.items()}
        names: dict[tuple[str, int], str] = {}  # file of each clip, by kind
        told: dict[str, dict[str, Any]] = {}
        for head, places in chosen.items():
            for kind, place in places.items():
                name = names.setdefault((kind, place), f"{kind}{head and f'-{slug(head)}'}.mp4")
                told.setdefault(head, {})[kind] = {**_numbers(place, scores, found), "video": name}
        for (kind, place), name in names.items():
            index = place - start  # the clips of the first prompt come first
            if index in videos and self.parallel.writes_samples:
                comment = _comment(jobs[index], kind, name, _numbers(place, scores, found), count)
                write_mp4(folder / name, videos[index].numpy(), fps=self.fps, comment=comment)
        if self.parallel.rank == 0:
            known = {"rollout": jobs[0].rollout, "prompt": jobs[0].prompt.text, **told.pop("")}
            write_json_atomic(folder / "scores.json", {**known, "heads": told} if told else known)


def _extremes(values: Tensor, failed: Tensor) -> dict[str, int]:
    """The clips with the greatest and with the least value."""
    best = int(values.masked_fill(failed, -torch.inf).argmax())
    worst = int(values.masked_fill(failed, torch.inf).argmin())
    return {"best": best, "worst": worst}


def _numbers(place: int, scores: Scores, found: Advantages) -> dict[str, Any]:
    """What is known of a clip of the first prompt."""
    raw = {name: float(head.raw[place]) for name, head in scores.heads.items() if head.raw[place].isfinite()}
    return {"clip": place, "advantage": float(found.values[0][place]), "reward": raw}


def _comment(job: Job, kind: str, name: str, numbers: Mapping[str, Any], count: int) -> str:
    """The prompt and the scores of a clip, for people."""
    shown = ", ".join(f"{head} {score:.4g}" for head, score in numbers["reward"].items())
    by = "" if name == f"{kind}.mp4" else f" by {name.removesuffix('.mp4').partition('-')[2]}"
    said = f"rollout {job.rollout} | {kind} of {count}{by} | advantage {numbers['advantage']:+.2f} | {shown}"
    return f"{' '.join(job.prompt.text.split())}\n{said}"
