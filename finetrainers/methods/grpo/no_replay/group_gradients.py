"""Without replay: what is stored of the clips of one prompt until their advantages are known. See `gradient_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .gradient_plan import GradientPlan

T = TypeVar("T")

#: One tensor for each trained weight that the loss depends on, in fp32.
Gradient = list[Tensor]

#: Advantages follow scores to this share of the largest; a larger error means that they are not what was planned for.
_FOLLOWS = 1e-6


class GroupClips(Generic[T]):
    """What is stored of each clip, by clip, of all of them or of the best and the worst so far."""

    def __init__(self, plan: GradientPlan, clips: int) -> None:
        """Args:
        plan: what to store.
        clips: of the prompt on this process.
        """
        self.keeps = plan.stored if plan.of_group(clips) < clips else "clips"
        self.most = plan.most
        self.scores: dict[int, tuple[float, ...]] = {}  # by clip
        self.stored: dict[int, T] = {}  # by clip; with `sums`, by the number of the sum

    def add(self, clip: int, found: T, scores: tuple[float, ...]) -> None:
        """Take what is to be stored of a clip; scores are those that its advantage follows."""
        self.scores[clip] = scores
        self.stored[clip] = found
        if self.keeps == "extremes" and len(self.stored) > self.most:
            ranked = sorted(self.stored, key=lambda one: (self.scores[one], one))
            del self.stored[ranked[self.most // 2]]

    def selected(self, advantages: Mapping[int, float]) -> dict[int, T]:
        """What is stored of the clips whose advantage is not 0; the rest is dropped.

        Raises:
            ValueError: the advantages are of clips of which nothing is stored any more.
        """
        stored, self.stored = self.stored, {}
        wanted = [clip for clip, advantage in advantages.items() if advantage]
        lost = [clip for clip in wanted if clip not in stored]
        if lost:
            raise ValueError(f"the gradients of clips {lost} are wanted and gone")
        return {clip: stored[clip] for clip in wanted}


class GroupGradients(GroupClips[Gradient]):
    """Gradients of clips, or of sums of them."""

    def add(self, clip: int, found: Gradient, scores: tuple[float, ...]) -> None:
        """Take a clip's gradient, which belongs to this object from now on; scores are those that its advantage follows."""
        if self.keeps != "sums":
            super().add(clip, found, scores)
            return
        self.scores[clip] = scores
        # Relative to the first clip's: scores may lie far from 0 and close together.
        row = self._relative(clip)
        for number, factor in enumerate(row[1:], start=1):
            if factor:
                add_to(self.stored, number, found, factor)
        add_to(self.stored, 0, found, 1.0)

    def combined(self, advantages: Mapping[int, float]) -> Gradient | None:
        """The sum of advantage times gradient over the given clips; what is stored is used up. None: all of them are 0.

        Raises:
            ValueError: the advantages do not follow the scores, or are of clips whose gradients are gone.
        """
        if not any(advantages.values()):
            self.stored = {}
            return None
        factors: Mapping[int, float] = advantages
        if self.keeps == "sums":
            factors = {key: factor for key, factor in self._factors(advantages).items() if key in self.stored}
        found, total = self.selected(factors), dict[int, Gradient]()
        for key in list(found):
            gradient = found.pop(key)
            torch._foreach_mul_(gradient, factors[key])
            add_to(total, 0, gradient, 1.0)
        return total[0]

    def _relative(self, clip: int) -> list[float]:
        """1 and the clip's scores less those of the first clip."""
        first = next(iter(self.scores.values()))
        return [1.0, *(score - start for score, start in zip(self.scores[clip], first, strict=True))]

    def _factors(self, advantages: Mapping[int, float]) -> dict[int, float]:
        """The factor of every sum, from advantages that are a constant plus multiples of scores."""
        table = torch.tensor([self._relative(clip) for clip in self.scores], dtype=torch.float64)
        wanted = torch.tensor([advantages.get(clip, 0.0) for clip in self.scores], dtype=torch.float64)
        scale = table.abs().amax(0).clamp_min(torch.finfo(torch.float64).tiny)
        found = torch.linalg.lstsq(table / scale, wanted[:, None], driver="gelsd").solution[:, 0]
        error = float(((table / scale) @ found - wanted).abs().max())
        if error > _FOLLOWS * float(wanted.abs().max()):
            raise ValueError(f"advantages do not follow the scores: they are off by {error:.2g}")
        return dict(enumerate((found / scale).tolist()))


def add_to(sums: dict[int, Gradient], key: int, gradient: Gradient, factor: float) -> None:
    """Add to a sum in place; the first gradient becomes the sum where it comes unchanged."""
    if key in sums:
        torch._foreach_add_(sums[key], gradient, alpha=factor)
    else:
        sums[key] = gradient if factor == 1.0 else list(torch._foreach_mul(gradient, factor))
