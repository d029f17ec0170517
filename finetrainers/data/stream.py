"""Which clips make up which batch: a pure function of seed and position, with no state to save.

Positions number the micro-batches of the whole run, over all ranks. An optimizer step is a stretch of positions, so the
order of training is the same at any world size, and resuming needs the step number alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from finetrainers.utils.seeding import derive_seed

from .buckets import Bucket
from .plan import Clip


@dataclass(frozen=True)
class StreamBatch:
    """Clips of one bucket, and the epoch in which they come."""

    epoch: int
    clips: tuple[Clip, ...]


@dataclass(frozen=True)
class MicroBatch:
    """One rank's share of an optimizer step.

    `weight` scales the mean loss of the micro-batch, so that summing over a rank's micro-batches and averaging over
    ranks gives the mean over all samples of the step, although batches at the end of an epoch are smaller.
    """

    epoch: int
    clips: tuple[Clip, ...]
    weight: float = 1.0

    @property
    def sample_keys(self) -> tuple[tuple[int, int], ...]:
        """`(epoch, item)` of every sample, from which its random numbers are derived."""
        return tuple((self.epoch, clip.index) for clip in self.clips)


class BatchStream:
    """The endless sequence of batches of a run.

    Every epoch walks a fresh permutation of all clips and appends each clip to the open batch of its bucket; a batch
    is emitted when it is full. What is left open at the end of the epoch is emitted too, smaller. So every clip comes
    exactly once per epoch, and the number of batches is the same in every epoch: a bucket of n clips gives
    ceil(n / batch_size), in whatever order they come.
    """

    def __init__(self, clips: Sequence[Clip], *, batch_size: int, seed: int) -> None:
        if not clips:
            raise ValueError("no clips to make batches of")
        self.clips = tuple(clips)
        self.batch_size = batch_size
        self.seed = seed
        counts = Counter(clip.bucket for clip in self.clips)
        self.num_batches = sum(-(-count // batch_size) for count in counts.values())
        # Neighbouring positions are of the same epoch or of two.
        self._epoch = lru_cache(maxsize=2)(self._build_epoch)

    def at(self, position: int) -> StreamBatch:
        """The batch at a position of the run."""
        epoch, place = divmod(position, self.num_batches)
        return StreamBatch(epoch, self._epoch(epoch)[place])

    def step(self, step: int, *, accumulation: int, rank: int, world_size: int) -> list[MicroBatch]:
        """The micro-batches of one rank in optimizer step `step`, counted from 0."""
        first = step * accumulation * world_size
        batches = [self.at(first + k) for k in range(accumulation * world_size)]
        samples = sum(len(batch.clips) for batch in batches)
        return [
            MicroBatch(batch.epoch, batch.clips, len(batch.clips) * world_size / samples)
            for batch in batches[rank::world_size]
        ]

    def steps_for_epochs(self, epochs: int, *, accumulation: int, world_size: int) -> int:
        """Optimizer steps that see every clip at least `epochs` times."""
        return -(-epochs * self.num_batches // (accumulation * world_size))

    def epoch_of_step(self, step: int, *, accumulation: int, world_size: int) -> int:
        """The epoch in which optimizer step `step` begins."""
        return step * accumulation * world_size // self.num_batches

    def _build_epoch(self, epoch: int) -> list[tuple[Clip, ...]]:
        order = list(self.clips)
        random.Random(derive_seed(self.seed, "order", epoch)).shuffle(order)
        open_batches: dict[Bucket, list[Clip]] = {}
        emitted = []
        for clip in order:
            batch = open_batches.setdefault(clip.bucket, [])
            batch.append(clip)
            if len(batch) == self.batch_size:
                # Removed, so that the bucket's next batch takes its place by its own first clip.
                emitted.append(tuple(open_batches.pop(clip.bucket)))
        emitted += [tuple(batch) for batch in open_batches.values()]
        return emitted


def fixed_batches(clips: Sequence[Clip], *, batch_size: int) -> list[MicroBatch]:
    """Batches in the given order, grouped by bucket, for evaluation: the same every time, each clip once."""
    groups: dict[Bucket, list[Clip]] = {}
    for clip in clips:
        groups.setdefault(clip.bucket, []).append(clip)
    return [
        MicroBatch(0, tuple(group[start : start + batch_size]))
        for group in groups.values()
        for start in range(0, len(group), batch_size)
    ]
