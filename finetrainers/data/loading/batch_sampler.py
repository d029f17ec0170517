"""The batch sampler, a pure function of seed and position: there is no state to save.

Positions number the micro-batches, over all ranks. An optimizer step is a row of positions, so the order of training is
the same at any world size. Resuming needs the step number and, if batches have been made in several ways, the first
step of each.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice

import numpy as np

from finetrainers.utils.failures import InputError
from finetrainers.utils.seeding import derive_seed

from ..buckets.buckets import Bucket, bucket_text, num_batches
from ..buckets.clip import Clip, cut_to
from ..buckets.windows import windows_by_item
from .order import NO_SAMPLES, Ints, Order, Samples, cut_into_batches, make_samples
from .position import DataPosition, Segment

#: Number of epochs in a row without a batch after which no batch is expected.
_EMPTY_EPOCHS = 1000


@dataclass(frozen=True)
class MicroBatch:
    """Clips of one bucket that a rank trains on at once.

    Attributes:
        epoch: the epoch in which they come.
        clips: the clips.
        weight: scales the mean loss of the micro-batch, so that summing over a rank's micro-batches and averaging over
            ranks gives the mean over all samples of the step, although batches differ in size.
        cycles: as in `Samples`; by default the epoch.
    """

    epoch: int
    clips: tuple[Clip, ...]
    weight: float = 1.0
    cycles: tuple[int, ...] = ()

    @property
    def sample_keys(self) -> tuple[tuple[int, int], ...]:
        """The `(cycle, item)` of every sample, the seed of its random numbers."""
        cycles = self.cycles or (self.epoch,) * len(self.clips)
        return tuple((cycle, clip.index) for cycle, clip in zip(cycles, self.clips, strict=True))


@dataclass(frozen=True)
class EpochRest:
    """The rest of an epoch that is partly trained on: its remaining samples, in their order."""

    epoch: int
    samples: Samples


@dataclass(frozen=True)
class _Batches:
    """Batches of an epoch, or of the rest of one: batch k has the samples `members[starts[k] : stops[k]]`."""

    samples: Samples
    real: int  # samples after these are padding
    members: Ints
    starts: Ints
    stops: Ints


class BatchSampler:
    """The endless sequence of batches of a run, or of a part of it in which batches are made in one way.

    Every epoch goes through its clips in a fresh order (`Order`) and appends each to the open batch of its bucket; a
    batch is emitted when it is full. At the end of the epoch the open batches are emitted smaller (`keep`), emitted
    filled up (`pad`), left out (`drop`) or left open (`wrap`).

    The rest of an epoch after a batch gives, with the same batch sizes, the batches that would have come. With other
    batch sizes, it still gives every clip once.

    Epochs are counted from the rest of a partly trained one, which is the 0th and may be empty.

    With `by_item`, batches are made of items instead, each with the bucket that its first window gets. In an optimizer
    step, a batch of items becomes as many micro-batches as the longest of them has windows: the first windows of all,
    then the second ones, and so on. All micro-batches of the step are dealt out to the ranks in turn.
    """

    def __init__(
        self,
        clips: Sequence[Clip],
        segment: Segment,
        *,
        seed: int,
        keep: Mapping[Bucket, float] | None = None,
        rest: EpochRest | None = None,
        by_item: bool = False,
    ) -> None:
        """Args:
        clips: of all datasets.
        segment: how batches are made; position 0 is at its first optimizer step.
        seed: determines the order.
        keep: see `Order`.
        rest: the samples that come first, by default all of epoch 0.
        by_item: whether all windows of an item come in one optimizer step.

        Raises:
            ValueError: no epoch has a batch.
        """
        if not clips:
            raise ValueError("no clips to make batches of")
        self.clips = tuple(clips)
        self.segment = segment
        self.seed = seed
        self.by_item = by_item
        # Batches are made of these: clips, or the windows of each item, represented by the first.
        self._windows = windows_by_item(self.clips) if by_item else [[index] for index in range(len(self.clips))]
        self._num_windows = np.array([len(windows) for windows in self._windows], dtype=np.int64)
        self.order = Order([self.clips[first] for first, *_ in self._windows], seed=seed, keep=keep or {})
        self._sizes = np.array([segment.clips_per_batch(bucket) for bucket in self.order.buckets], dtype=np.int64)
        self._rest = rest or EpochRest(-1, NO_SAMPLES)
        # Totals up to each epoch, see `_count`, computed when needed or by a formula.
        self._totals = [self._count(0)]
        if self.order.same_counts:
            self._per_epoch = self._count(1)
        self._last_epoch = 0  # of the last lookup
        # Neighboring positions are in one epoch or in two.
        self._batches = lru_cache(maxsize=2)(self._make_batches)
        if self.order.same_counts and segment.epoch_end == "drop" and not self._per_epoch[-1]:
            message = "no bucket has clips for a full batch; lower the batch size, or use another epoch_end"
            raise InputError(message, "conflict")

    def batch_at(self, position: int, window: int = 0) -> MicroBatch:
        """Return the batch at a position, counted from 0; with `by_item`, window `window` of its items that have it."""
        nth, samples = self._samples_at(position)
        samples = samples[self._num_windows[samples["items"]] > window]
        clips = (
            cut_to(self.clips[self._windows[item][window]], self.order.buckets[slot])
            for item, slot in zip(samples["items"].tolist(), samples["slots"].tolist(), strict=True)
        )
        return MicroBatch(self._rest.epoch + nth, tuple(clips), cycles=tuple(samples["cycles"].tolist()))

    def _samples_at(self, position: int) -> tuple[int, Samples]:
        """Return the epoch of a position and the samples of its batch."""
        nth, batch = self._find(position)
        batches = self._batches(nth)
        return nth, batches.samples[batches.members[batches.starts[batch] : batches.stops[batch]]]

    def rest_at(self, step: int) -> EpochRest:
        """Return the rest of the epoch in which an optimizer step begins."""
        nth, batch = self._find(self._position(step))
        batches = self._batches(nth)
        is_left = batches.samples["slots"] >= 0
        is_left[batches.real :] = False
        for start, stop in zip(batches.starts[:batch].tolist(), batches.stops[:batch].tolist(), strict=True):
            is_left[batches.members[start:stop]] = False
        return EpochRest(self._rest.epoch + nth, batches.samples[is_left])

    def step(self, step: int, *, data_rank: int = 0, data_size: int = 1) -> list[MicroBatch]:
        """Return the micro-batches of one data rank in optimizer step `step`, counted from 0."""
        first, number = self._position(step), self.segment.per_step
        if self.by_item:
            return self._step_of_windows(range(first, first + number), data_rank, data_size)
        samples = self._num_samples(first, number)
        batches = [self.batch_at(position) for position in range(first + data_rank, first + number, data_size)]
        return [replace(batch, weight=len(batch.clips) * data_size / samples) for batch in batches]

    def num_micro_batches(self, step: int, *, data_size: int = 1) -> int:
        """Return the number of micro-batches of each data rank in an optimizer step."""
        if not self.by_item:
            return self.segment.per_step // data_size
        first = self._position(step)
        counts = self._window_counts(range(first, first + self.segment.per_step))
        return -(-sum(int(numbers.max()) for numbers in counts.values()) // data_size)

    def _window_counts(self, positions: range) -> dict[int, Ints]:
        """Return the number of windows of each item in the batches of an optimizer step, by position."""
        return {position: self._num_windows[self._samples_at(position)[1]["items"]] for position in positions}

    def _step_of_windows(self, positions: range, data_rank: int, data_size: int) -> list[MicroBatch]:
        """Return a rank's micro-batches of an optimizer step with `by_item`.

        All ranks have equally many, since sharded networks hang otherwise: where the number does not divide, the last
        micro-batches are a window of the first position that has no weight.
        """
        counts = self._window_counts(positions)
        windows = [(position, window) for position, numbers in counts.items() for window in range(numbers.max())]
        samples = sum(int(numbers.sum()) for numbers in counts.values())
        batches = [self.batch_at(position, window) for position, window in windows[data_rank::data_size]]
        batches = [replace(batch, weight=len(batch.clips) * data_size / samples) for batch in batches]
        if len(batches) < -(-len(windows) // data_size):
            spare = self.batch_at(positions[0])
            batches.append(replace(spare, clips=spare.clips[:1], cycles=spare.cycles[:1], weight=0.0))
        return batches

    def _num_samples(self, position: int, number: int) -> int:
        """Return the number of samples in `number` batches from a position on."""
        samples = 0
        while number:
            nth, batch = self._find(position)
            batches = self._batches(nth)
            stop = min(batch + number, len(batches.starts))
            samples += int((batches.stops[batch:stop] - batches.starts[batch:stop]).sum())
            position, number = position + stop - batch, number - (stop - batch)
        return samples

    def epoch_at(self, step: int) -> int:
        """Return the epoch of the last micro-batch of an optimizer step."""
        return self._rest.epoch + self._find(self._position(step + 1) - 1)[0]

    def left_out(self, epoch: int) -> int:
        """Return the number of clips that fall through every bucket in an epoch."""
        return int(self.order.counts(epoch)[-1])

    def steps_for_epochs(self, epochs: int) -> int:
        """Return the number of optimizer steps that complete `epochs` epochs, up to batches that `wrap` leaves open.

        Raises:
            ValueError: the epochs have no batch at all.
        """
        last = epochs - 1 - self._rest.epoch
        batches = self._batches_until(last) if last >= 0 else 0
        if batches == 0 and self._rest.epoch < 0:
            message = f"{epochs} epochs have no full batch; train for more, repeat clips, or lower the batch size"
            raise InputError(message, "conflict")
        return self.segment.first_step + -(-batches // self.segment.per_step)

    def _position(self, step: int) -> int:
        """Return the first position of an optimizer step."""
        return (step - self.segment.first_step) * self.segment.per_step

    def _find(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the batch within it."""
        before = self._batches_until(self._last_epoch - 1)
        if before <= position < self._batches_until(self._last_epoch):
            return self._last_epoch, position - before
        bound = 1
        while self._batches_until(bound - 1) <= position:
            # By a formula, or one epoch after the other.
            bound = 2 * bound if self.order.same_counts else max(bound + 1, len(self._totals))
            before = self._batches_until(bound - 1 - _EMPTY_EPOCHS) if bound > _EMPTY_EPOCHS + 1 else -1
            if self.segment.epoch_end != "wrap" and before == self._batches_until(bound - 1):
                message = f"{_EMPTY_EPOCHS} epochs in a row have no full batch; lower the batch size"
                raise InputError(message, "conflict")
        self._last_epoch = bisect_right(range(bound), position, key=self._batches_until)
        return self._last_epoch, position - self._batches_until(self._last_epoch - 1)

    def _batches_until(self, nth: int) -> int:
        """Return the number of batches in the epochs up to and including this one."""
        if nth < 0:
            return 0
        totals = self._totals_until(nth)
        return int((totals[:-1] // self._sizes).sum() if self.segment.epoch_end == "wrap" else totals[-1])

    def _totals_until(self, nth: int) -> Ints:
        """Return the total of `_count` over the epochs up to and including this one."""
        if self.order.same_counts:
            total: Ints = self._totals[0] + nth * self._per_epoch
            return total
        while len(self._totals) <= nth:
            self._totals.append(self._totals[-1] + self._count(len(self._totals)))
        return self._totals[nth]

    def _count(self, nth: int) -> Ints:
        """Return the number of samples of each bucket in one epoch, and last of its batches without `wrap`."""
        if nth == 0:
            slots = self._rest.samples["slots"]
            counts = np.bincount(slots[slots >= 0], minlength=len(self.order.buckets))
        else:
            counts = self.order.counts(self._rest.epoch + nth)[:-1]
        ends = [self.segment.epoch_end] * len(counts)
        return np.append(counts, sum(map(num_batches, counts.tolist(), self._sizes.tolist(), ends)))

    def _samples(self, nth: int) -> Samples:
        return self._rest.samples if nth == 0 else self.order.samples(self._rest.epoch + nth)

    def _make_batches(self, nth: int) -> _Batches:
        samples = self._samples(nth)
        if self.segment.epoch_end == "wrap":
            samples = np.concatenate([self._carried(nth), samples])
        real = len(samples)
        if self.segment.epoch_end == "pad":
            samples = np.concatenate([samples, self._padding(nth, samples)])
        members, starts, stops = cut_into_batches(samples["slots"], self._sizes)
        if self.segment.epoch_end in ("drop", "wrap"):
            full = stops - starts == self._sizes[samples["slots"][members[starts]]]
            starts, stops = starts[full], stops[full]
        return _Batches(samples, real, members, starts, stops)

    def _carried(self, nth: int) -> Samples:
        """Return the samples of batches that earlier epochs left open, in their order."""
        if nth == 0:
            return NO_SAMPLES
        missing = self._totals_until(nth - 1)[:-1] % self._sizes
        parts: list[Samples] = []
        for before in range(nth - 1, -1, -1):
            if not missing.any():
                break
            samples = self._samples(before)
            chosen = np.zeros(len(samples), dtype=np.bool_)
            for slot in np.flatnonzero(missing):
                last = np.flatnonzero(samples["slots"] == slot)[-missing[slot] :]
                chosen[last] = True
                missing[slot] -= len(last)
            parts.insert(0, samples[chosen])
        return np.concatenate([*parts, NO_SAMPLES])

    def _padding(self, nth: int, samples: Samples) -> Samples:
        """Return samples that fill up batches, from their bucket, none twice in a batch if there are enough clips.

        They have separate cycles, so that they do not get the noise of the clips' regular samples again.
        """
        epoch, first_step = self._rest.epoch + nth, self.segment.first_step
        items: list[int] = []
        slots: list[int] = []
        members, starts, stops = cut_into_batches(samples["slots"], self._sizes)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            batch = samples[members[start:stop]]
            slot = int(batch["slots"][0])
            missing = int(self._sizes[slot]) - len(batch)
            if missing:
                bucket = self.order.buckets[slot]
                pool = [index for index, clip in enumerate(self.order.clips) if bucket in clip.buckets]
                rng = random.Random(derive_seed(self.seed, "pad", epoch, first_step, bucket_text(bucket)))
                candidates = rng.sample(pool, min(len(pool), len(batch) + missing))
                others = [item for item in candidates if item not in set(batch["items"].tolist())]
                items += islice(cycle(others or candidates), missing)
                slots += [slot] * missing
        cycles = [-1 - derive_seed("pad", epoch, first_step, k) for k in range(len(items))]
        return make_samples(items, cycles, slots)


def sampler_for(
    clips: Sequence[Clip],
    data_position: DataPosition,
    *,
    keep: Mapping[Bucket, float] | None = None,
    by_item: bool = False,
) -> BatchSampler:
    """Return the sampler of a data position's last segment, which starts with the rest of the epoch before it.

    Args:
        clips: of all datasets.
        data_position: of the start of the data, or of a checkpoint.
        keep: see `Order`.
        by_item: see `BatchSampler`.
    """
    rest: EpochRest | None = None
    segments = data_position.segments
    for segment, following in zip(segments, (*segments[1:], None), strict=True):
        sampler = BatchSampler(clips, segment, seed=data_position.seed, keep=keep, rest=rest, by_item=by_item)
        if following is not None:
            rest = sampler.rest_at(following.first_step)
    return sampler


def fixed_batches(clips: Sequence[Clip], segment: Segment) -> list[MicroBatch]:
    """Return batches for evaluation, grouped by bucket, in the order of `clips`: always the same, each clip once."""
    groups: dict[Bucket, list[Clip]] = {}
    for clip in clips:
        groups.setdefault(clip.bucket, []).append(clip)
    return [
        MicroBatch(0, tuple(group[start : start + size]))
        for size, group in ((segment.clips_per_batch(bucket), group) for bucket, group in groups.items())
        for start in range(0, len(group), size)
    ]
