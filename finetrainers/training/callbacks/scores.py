"""Scores of samples by the evaluation rewards, the same on any number of processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from finetrainers.config.rewards import RewardEntry
from finetrainers.parallel.ranks import DistributedContext

from .base import Record

#: Name of the sum of all scores, weighted by the weights of the rewards.
WEIGHTED_SUM = "weighted_sum"


class SampleScores:
    """Scorer of samples by the evaluation rewards, whose networks stay on the device."""

    def __init__(self, entries: Sequence[RewardEntry], parallel: DistributedContext) -> None:
        """Args:
        entries: the rewards.
        parallel: the processes of the run, which load them in turns.
        """
        from finetrainers.rewards.reward_set import RewardSet  # a run without rewards does not import them

        # A clip without a score does not end a training that does not need it; a warning names it.
        self.panel = parallel.one_at_a_time(
            "loading the evaluation rewards", lambda: RewardSet(entries, on_error="mask")
        )
        self.parallel = parallel

    def record(self, samples: Sequence[tuple[int, str, np.ndarray]], *, fps: float) -> Record:
        """Return the mean raw score of each reward, and the weighted sum of normalized ones; every rank must call it.

        Each clip is scored by itself, and means are taken in the order of the clips, so that they do not depend on the
        process that has a clip. A reward without any score is not in the record.

        Args:
            samples: of this rank: number, prompt, and frames `[T, H, W, 3]` uint8.
            fps: frames per second of the samples.
        """
        local_scores: list[tuple[int, dict[str, tuple[float, float]]]] = []
        with self.parallel.raise_on_all_ranks("scoring the samples"):
            for number, prompt, frames in samples:
                video = torch.from_numpy(frames).permute(0, 3, 1, 2)[None].float() / 255
                heads = self.panel.score(video, [prompt], fps=fps, first_clip=number).heads
                local_scores.append((number, {name: (h.raw.item(), h.normalized.item()) for name, h in heads.items()}))
        by_clip = [scores for _, scores in sorted(self.parallel.gather_objects(local_scores), key=lambda pair: pair[0])]
        weights = self.panel.weights
        record = {f"eval_reward/{name}": _mean([scores[name][0] for scores in by_clip]) for name in weights}
        if sum(bool(weight) for weight in weights.values()) > 1:
            sums = [sum(weight * scores[name][1] for name, weight in weights.items() if weight) for scores in by_clip]
            record[f"eval_reward/{WEIGHTED_SUM}"] = _mean(sums)
        return {name: value for name, value in record.items() if np.isfinite(value)}


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if np.isfinite(value)]
    return sum(finite) / len(finite) if finite else float("nan")
