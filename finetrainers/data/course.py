"""Which way a run has gone through its data: all that a checkpoint keeps of the data position. Imports no torch.

A run that is continued with another batch size, accumulation or number of processes goes on with the clips that its epoch
has left. Its way is then a row of stretches, each with one way of making batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetrainers.config.root import TrainConfig


@dataclass(frozen=True)
class Stretch:
    """Optimizer steps that make their batches in one way.

    Attributes:
        first_step: the first of them, counted from 0.
        batch_size: clips of a micro-batch.
        per_step: micro-batches of an optimizer step, over all ranks.
    """

    first_step: int
    batch_size: int
    per_step: int


@dataclass(frozen=True)
class Course:
    """The way of a run through its data.

    Attributes:
        seed: decides the order; the run's seed when the data was begun.
        stretches: in order, at least one; at the first step of the first one, the data is at its beginning.
    """

    seed: int
    stretches: tuple[Stretch, ...]

    @property
    def first_step(self) -> int:
        """The optimizer step at which the data was begun."""
        return self.stretches[0].first_step

    @classmethod
    def begin(cls, config: TrainConfig, *, world_size: int, step: int = 0) -> Course:
        """From the beginning of the data, at an optimizer step."""
        return cls(config.training.seed, (_stretch(config, world_size, step),))

    def go_on(self, config: TrainConfig, *, world_size: int, step: int) -> Course:
        """The way of a run that is continued after `step` optimizer steps, with whatever batches it has now."""
        stretches = tuple(
            stretch for stretch in self.stretches if stretch.first_step < step or stretch is self.stretches[0]
        )
        now = _stretch(config, world_size, step)
        last = stretches[-1]
        if (now.batch_size, now.per_step) == (last.batch_size, last.per_step):
            return Course(self.seed, stretches)
        kept = stretches if last.first_step < step else stretches[:-1]
        return Course(self.seed, (*kept, now))

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {"seed": self.seed, "stretches": [[s.first_step, s.batch_size, s.per_step] for s in self.stretches]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Course:
        """Undo `state`."""
        stretches: Sequence[Sequence[int]] = state["stretches"]
        return cls(int(state["seed"]), tuple(Stretch(*map(int, stretch)) for stretch in stretches))


def _stretch(config: TrainConfig, world_size: int, step: int) -> Stretch:
    return Stretch(step, config.dataloader.batch_size, config.training.gradient_accumulation_steps * world_size)
