"""Which clips make up which batch: a pure function of seed and position, with no state to save.

Positions number the micro-batches, over all ranks. An optimizer step is a row of positions, so the order of training is the
same at any world size, and resuming needs the step number and, if batches have been made in several ways, since when.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from finetrainers.utils.seeding import derive_seed

from .buckets import Bucket
from .clip import Clip
from .course import Course


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


@dataclass(frozen=True)
class Begun:
    """An epoch of which a part has been seen: what is left of it, in its order."""

    epoch: int
    clips: tuple[Clip, ...]


class BatchStream:
    """The endless sequence of batches of a run, or of that part of it in which batches are made in one way.

    Every epoch walks a fresh permutation of all clips and appends each clip to the open batch of its bucket; a batch
    is emitted when it is full. What is left open at the end of the epoch is emitted too, smaller. So every clip comes
    exactly once per epoch, and the number of batches is the same in every epoch: a bucket of n clips gives
    ceil(n / batch_size), in whatever order they come.

    What is left of an epoch at a batch's end gives, walked through with the same batch size, the same batches that would
    have come. With another one it still gives every clip once.
    """

    def __init__(
        self,
        clips: Sequence[Clip],
        *,
        batch_size: int,
        seed: int,
        begun: Begun | None = None,
        first_step: int = 0,
    ) -> None:
        """Args:
        clips: of the data set.
        batch_size: clips of a batch.
        seed: decides the order.
        begun: what comes first; default: the whole of epoch 0.
        first_step: optimizer step of position 0.
        """
        if not clips:
            raise ValueError("no clips to make batches of")
        self.clips = tuple(clips)
        self.batch_size = batch_size
        self.seed = seed
        self.first_step = first_step
        self._begun = Begun(-1, ()) if begun is None else begun
        self._rest = self._batches(self._begun.clips)
        counts = Counter(clip.bucket for clip in self.clips)
        self.num_batches = sum(-(-count // batch_size) for count in counts.values())
        # Neighbouring positions are of the same epoch or of two.
        self._epoch = lru_cache(maxsize=2)(self._build_epoch)

    def at(self, position: int) -> StreamBatch:
        """The batch at a position, counted from 0."""
        epoch, place = self._place(position)
        return StreamBatch(epoch, self._of_epoch(epoch)[place])

    def left_at(self, position: int) -> Begun:
        """What is left of the epoch that a position lies in."""
        epoch, place = self._place(position)
        seen = {clip.index for batch in self._of_epoch(epoch)[:place] for clip in batch}
        order = self._begun.clips if epoch == self._begun.epoch else self._order(epoch)
        return Begun(epoch, tuple(clip for clip in order if clip.index not in seen))

    def step(self, step: int, *, accumulation: int, rank: int, world_size: int) -> list[MicroBatch]:
        """The micro-batches of one rank in optimizer step `step`, counted from 0."""
        first = (step - self.first_step) * accumulation * world_size
        batches = [self.at(first + k) for k in range(accumulation * world_size)]
        samples = sum(len(batch.clips) for batch in batches)
        return [
            MicroBatch(batch.epoch, batch.clips, len(batch.clips) * world_size / samples)
            for batch in batches[rank::world_size]
        ]

    def steps_for_epochs(self, epochs: int, *, accumulation: int, world_size: int) -> int:
        """Optimizer steps after which every clip has been seen at least `epochs` times."""
        later = epochs - 1 - self._begun.epoch  # epochs after the one that has begun
        batches = len(self._rest) + later * self.num_batches if later >= 0 else 0
        return self.first_step + -(-batches // (accumulation * world_size))

    def _place(self, position: int) -> tuple[int, int]:
        """Epoch, and place in what there is of it."""
        if position < len(self._rest):
            return self._begun.epoch, position
        epochs, place = divmod(position - len(self._rest), self.num_batches)
        return self._begun.epoch + 1 + epochs, place

    def _of_epoch(self, epoch: int) -> list[tuple[Clip, ...]]:
        return self._rest if epoch == self._begun.epoch else self._epoch(epoch)

    def _order(self, epoch: int) -> list[Clip]:
        order = list(self.clips)
        random.Random(derive_seed(self.seed, "order", epoch)).shuffle(order)
        return order

    def _build_epoch(self, epoch: int) -> list[tuple[Clip, ...]]:
        return self._batches(self._order(epoch))

    def _batches(self, order: Sequence[Clip]) -> list[tuple[Clip, ...]]:
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


def stream_of(clips: Sequence[Clip], course: Course) -> BatchStream:
    """The batches of the last stretch of a run's way, which begins where the stretches before it have led."""
    begun: Begun | None = None
    for stretch, following in pairwise(course.stretches):
        stream = BatchStream(clips, batch_size=stretch.batch_size, seed=course.seed, begun=begun)
        begun = stream.left_at((following.first_step - stretch.first_step) * stretch.per_step)
    last = course.stretches[-1]
    return BatchStream(clips, batch_size=last.batch_size, seed=course.seed, begun=begun, first_step=last.first_step)


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
