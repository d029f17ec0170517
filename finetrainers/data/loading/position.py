"""The data position that a checkpoint stores: one segment per batch size, accumulation and world size.

A run that resumes with another batch size, accumulation or number of processes continues with the clips that are left
of its epoch. Its data position is then a list of segments, each with one way of making batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import EpochEnd
from finetrainers.utils.failures import InputError

from ..buckets.buckets import Bucket


@dataclass(frozen=True)
class Segment:
    """Optimizer steps with the same batch size, accumulation, world size and end of epochs.

    Attributes:
        first_step: the first of them, counted from 0.
        batch_size: clips of a micro-batch, in buckets that are not in `bucket_sizes`.
        per_step: micro-batches of an optimizer step, over all ranks.
        bucket_sizes: batch sizes of other buckets, `(bucket, clips)`, sorted.
        epoch_end: how clips that do not fill a batch are treated at the end of an epoch.
    """

    first_step: int
    batch_size: int
    per_step: int
    bucket_sizes: tuple[tuple[Bucket, int], ...] = ()
    epoch_end: EpochEnd = "keep"

    @classmethod
    def of(cls, config: TrainConfig, *, data_size: int, step: int) -> Segment:
        """Return the batches of a configuration, from an optimizer step on."""
        loading = config.dataloader
        return cls(
            first_step=step,
            batch_size=loading.batch_size,
            per_step=config.training.gradient_accumulation_steps * data_size,
            bucket_sizes=tuple(sorted(loading.bucket_batch_sizes)),
            epoch_end=loading.epoch_end,
        )

    def clips_per_batch(self, bucket: Bucket) -> int:
        """Return the number of clips in a batch of this bucket."""
        return dict(self.bucket_sizes).get(bucket, self.batch_size)

    def state(self) -> list[Any]:
        """Return the segment as plain values: three numbers where nothing else is set."""
        numbers: list[Any] = [self.first_step, self.batch_size, self.per_step]
        if not self.bucket_sizes and self.epoch_end == "keep":
            return numbers
        return [*numbers, [[list(bucket), size] for bucket, size in self.bucket_sizes], self.epoch_end]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Segment:
        """Restore a segment from its `state`."""
        first_step, batch_size, per_step, *others = state
        sizes, epoch_end = others or [(), "keep"]
        bucket_sizes = tuple(((b[0], b[1], b[2]), int(size)) for b, size in sizes)
        return cls(int(first_step), int(batch_size), int(per_step), bucket_sizes, epoch_end)


@dataclass(frozen=True)
class DataPosition:
    """The data position of a run.

    Attributes:
        seed: determines the order; the run's seed when it started the data.
        segments: in order, at least one; at the first step of the first one, the data is at its beginning.
    """

    seed: int
    segments: tuple[Segment, ...]

    @property
    def first_step(self) -> int:
        """The optimizer step at which the data started."""
        return self.segments[0].first_step

    @classmethod
    def begin(cls, config: TrainConfig, *, data_size: int, step: int = 0) -> DataPosition:
        """Return the position at the start of the data, at an optimizer step."""
        return cls(config.training.seed, (Segment.of(config, data_size=data_size, step=step),))

    def resume(self, config: TrainConfig, *, data_size: int, step: int) -> DataPosition:
        """Return the position of a run that resumes after `step` optimizer steps, with the batches it has now."""
        segments = tuple(
            segment for segment in self.segments if segment.first_step < step or segment is self.segments[0]
        )
        current = Segment.of(config, data_size=data_size, step=step)
        last = segments[-1]
        if replace(current, first_step=last.first_step) == last:  # batches are made in the same way
            return DataPosition(self.seed, segments)
        earlier = segments if last.first_step < step else segments[:-1]
        return DataPosition(self.seed, (*earlier, current))

    def state(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return {"seed": self.seed, "stretches": [segment.state() for segment in self.segments]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DataPosition:
        """Restore a position from its `state`.

        Raises:
            InputError: it is not one.
        """
        try:
            return cls(int(state["seed"]), tuple(map(Segment.from_state, state["stretches"])))
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise InputError(f"the checkpoint's data position cannot be read: {error!r}", "unreadable") from None
