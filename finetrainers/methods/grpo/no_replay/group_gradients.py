"""Storage for the gradients or graphs of one prompt's clips until their advantages are known; see `gradient_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .gradient_plan import GradientPlan

T = TypeVar("T")

#: One fp32 tensor for each trainable tensor that the loss depends on.
Gradient = list[Tensor]

#: Largest error of advantages computed from scores, as a share of the largest; beyond it the plan is wrong.
_TOLERANCE = 1e-6


class GroupClips(Generic[T]):
    """Gradients or graphs of one prompt's clips, by clip: of all of them, or of the best and the worst so far."""

    def __init__(self, plan: GradientPlan, clips: int) -> None:
        """Args:
        plan: decides which clips are stored.
        clips: number of the prompt's clips on this process.
        """
        self.keeps = plan.stored if plan.max_stored_for(clips) < clips else "clips"
        self.max_stored = plan.max_stored
        self.scores: dict[int, tuple[float, ...]] = {}  # by clip
        self.stored: dict[int, T] = {}  # by clip; with `sums`, by the number of the sum

    def add(self, clip: int, payload: T, scores: tuple[float, ...]) -> None:
        """Store the payload of a clip; its advantage depends on `scores`."""
        self.scores[clip] = scores
        self.stored[clip] = payload
        if self.keeps == "extremes" and len(self.stored) > self.max_stored:
            ranked = sorted(self.stored, key=lambda index: (self.scores[index], index))
            del self.stored[ranked[self.max_stored // 2]]

    def pop_selected(self, advantages: Mapping[int, float]) -> dict[int, T]:
        """Return the payloads of the clips whose advantage is not 0, and drop the others.

        Raises:
            ValueError: clips with an advantage are not stored any more.
        """
        stored, self.stored = self.stored, {}
        trained = [clip for clip, advantage in advantages.items() if advantage]
        lost = [clip for clip in trained if clip not in stored]
        if lost:
            raise ValueError(f"the gradients of clips {lost} are no longer stored")
        return {clip: stored[clip] for clip in trained}


class GroupGradients(GroupClips[Gradient]):
    """Gradients of clips, or weighted sums of them."""

    def add(self, clip: int, gradient: Gradient, scores: tuple[float, ...]) -> None:
        """Store or add a clip's gradient, which this object owns from now on; its advantage depends on `scores`."""
        if self.keeps != "sums":
            super().add(clip, gradient, scores)
            return
        self.scores[clip] = scores
        # Relative to the first clip's scores, since scores may lie far from 0 and close together.
        row = self._relative(clip)
        for number, factor in enumerate(row[1:], start=1):
            if factor:
                add_to(self.stored, number, gradient, factor)
        add_to(self.stored, 0, gradient, 1.0)

    def pop_combined(self, advantages: Mapping[int, float]) -> Gradient | None:
        """Return the sum of advantage times gradient over clips, or None if all advantages are 0; empty the storage.

        Raises:
            ValueError: the advantages do not follow the scores, or are of clips whose gradients are gone.
        """
        if not any(advantages.values()):
            self.stored = {}
            return None
        factors: Mapping[int, float] = advantages
        if self.keeps == "sums":
            factors = {key: factor for key, factor in self._factors(advantages).items() if key in self.stored}
        gradients, total = self.pop_selected(factors), dict[int, Gradient]()
        for key in list(gradients):
            gradient = gradients.pop(key)
            torch._foreach_mul_(gradient, factors[key])
            add_to(total, 0, gradient, 1.0)
        return total[0]

    def _relative(self, clip: int) -> list[float]:
        """Return 1 and the clip's scores less those of the first clip."""
        first = next(iter(self.scores.values()))
        return [1.0, *(score - start for score, start in zip(self.scores[clip], first, strict=True))]

    def _factors(self, advantages: Mapping[int, float]) -> dict[int, float]:
        """Return the factor of every sum, from advantages that are a constant plus multiples of scores."""
        table = torch.tensor([self._relative(clip) for clip in self.scores], dtype=torch.float64)
        targets = torch.tensor([advantages.get(clip, 0.0) for clip in self.scores], dtype=torch.float64)
        scale = table.abs().amax(0).clamp_min(torch.finfo(torch.float64).tiny)
        solution = torch.linalg.lstsq(table / scale, targets[:, None], driver="gelsd").solution[:, 0]
        error = float(((table / scale) @ solution - targets).abs().max())
        if error > _TOLERANCE * float(targets.abs().max()):
            raise ValueError(f"advantages do not match the scores: they are off by {error:.2g}")
        return dict(enumerate((solution / scale).tolist()))


def add_to(sums: dict[int, Gradient], key: int, gradient: Gradient, factor: float) -> None:
    """Add a scaled gradient to a sum in place; a first gradient with factor 1 becomes the sum itself."""
    if key in sums:
        torch._foreach_add_(sums[key], gradient, alpha=factor)
    else:
        sums[key] = gradient if factor == 1.0 else list(torch._foreach_mul(gradient, factor))
