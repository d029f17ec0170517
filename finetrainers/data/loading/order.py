"""The order of an epoch: its clips, each with its bucket, as pure functions of the seed.

Clips of a dataset come in endless shuffles of all of them, one after the other. With `repeats` r, an epoch takes the
next n * r of its n clips: each comes r times in the long run, and never k + 2 times before all came k times. A clip's
place in this endless row is `(cycle, item)`, the shuffle and the clip; from it its random numbers are derived. With r =
1 the cycle is the epoch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from finetrainers.utils.failures import InputError
from finetrainers.utils.seeding import derive_seed

from ..buckets.buckets import Bucket, bucket_probabilities
from ..buckets.clip import Clip

Ints: TypeAlias = npt.NDArray[np.int64]
#: Samples in their order, in columns: `items`, indices among all clips; `cycles`, the shuffle that each belongs to;
#: `slots`, indices among all buckets, -1 where a clip is left out.
Samples: TypeAlias = npt.NDArray[np.void]

#: Repeats are taken as the nearest fraction with at most this denominator, so that epochs are counted exactly.
_MAX_DENOMINATOR = 10**6


def make_samples(items: Sequence[int] | Ints, cycles: Sequence[int] | Ints, slots: Sequence[int] | Ints) -> Samples:
    """Return samples made of their columns."""
    samples = np.empty(len(items), dtype=[("items", np.int64), ("cycles", np.int64), ("slots", np.int64)])
    samples["items"], samples["cycles"], samples["slots"] = items, cycles, slots
    return samples


NO_SAMPLES = make_samples([], [], [])


@dataclass(frozen=True)
class _Dataset:
    number: int
    clips: Ints  # indices among all clips
    repeats: Fraction


class Order:
    """The samples of every epoch.

    Attributes:
        buckets: all that clips can come in; slots are indices among them.
        same_counts: whether every epoch has equally many clips of each bucket.
    """

    def __init__(self, clips: Sequence[Clip], *, seed: int, keep: Mapping[Bucket, float]) -> None:
        """Args:
        clips: of all datasets.
        seed: determines the order.
        keep: probability that a clip stays in a bucket, by default 1.

        Raises:
            ValueError: clips of one dataset differ in `repeats`.
        """
        self.clips = clips
        self.seed = seed
        self._datasets = _datasets(clips)
        self.buckets = tuple(dict.fromkeys(bucket for clip in clips for bucket in clip.buckets))
        slots = {bucket: slot for slot, bucket in enumerate(self.buckets)}
        self._indices = _ints([clip.index for clip in clips])
        # Clips that may fall through the same buckets share a ladder of them: their slots, then -1.
        rungs: dict[tuple[Bucket, ...], int] = {}
        self._ladder = _ints([rungs.setdefault(clip.buckets, len(rungs)) for clip in clips])
        self._rungs = [_ints([*(slots[bucket] for bucket in buckets), -1]) for buckets in rungs]
        self._thresholds = [_thresholds(buckets, keep) for buckets in rungs]
        self._is_fixed = all(thresholds[0] >= 1.0 for thresholds in self._thresholds)
        has_integer_repeats = all(dataset.repeats.denominator == 1 for dataset in self._datasets)
        self.same_counts = self._is_fixed and has_integer_repeats
        # Sized for an epoch and its neighbor, per dataset.
        self._shuffled = lru_cache(maxsize=2 * len(self._datasets))(self._shuffle)
        self.samples = lru_cache(maxsize=3)(self._samples)
        self.counts = lru_cache(maxsize=1 if self.same_counts else 3)(self._counts)

    def draw_slots(self, items: Ints, cycles: Ints) -> Ints:
        """Return the slot of each sample's bucket: one draw for each, from (seed, cycle, item)."""
        if self._is_fixed:
            return np.array([rungs[0] for rungs in self._rungs], dtype=np.int64)[self._ladder[items]]
        draws = np.empty(len(items))
        for cycle in np.unique(cycles).tolist():
            in_cycle = cycles == cycle
            draws[in_cycle] = self._draws(cycle, self._indices[items[in_cycle]])
        slots = np.empty_like(items)
        ladders = self._ladder[items]
        for ladder, (rungs, thresholds) in enumerate(zip(self._rungs, self._thresholds, strict=True)):
            same_ladder = ladders == ladder
            slots[same_ladder] = rungs[np.searchsorted(thresholds, draws[same_ladder], side="right")]
        return slots

    def _draws(self, cycle: int, indices: Ints) -> npt.NDArray[np.float64]:
        """Return uniform numbers in [0, 1), one for each clip by its index.

        Each is output number `index` of SplitMix64 (Steele, Lea and Flood 2014), which needs none of the earlier
        outputs: indices of windows are far apart.
        """
        seed = np.uint64(derive_seed(self.seed, "keep", cycle))
        bits = seed + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        return (bits >> np.uint64(11)) * 2.0**-53

    def _samples(self, epoch: int) -> Samples:
        parts = [self._members(dataset, epoch, shuffled=True) for dataset in self._datasets]
        samples = np.concatenate(
            [make_samples(items, cycles, self.draw_slots(items, cycles)) for items, cycles in parts]
        )
        if len(parts) == 1:
            return samples
        # The sequence of datasets is shuffled; each keeps its own order.
        dataset_numbers = [number for number, (items, _) in enumerate(parts) for _ in range(len(items))]
        random.Random(derive_seed(self.seed, "mix", epoch)).shuffle(dataset_numbers)
        permutation = np.empty(len(samples), dtype=np.int64)
        permutation[np.argsort(_ints(dataset_numbers), kind="stable")] = np.arange(len(samples))
        return samples[permutation]

    def _counts(self, epoch: int) -> Ints:
        """Return the number of clips of each bucket in an epoch, and last of those that are left out of it."""
        parts = [self._members(dataset, epoch, shuffled=False) for dataset in self._datasets]
        slots = np.concatenate([self.draw_slots(items, cycles) for items, cycles in parts])
        counts = np.bincount(slots + 1, minlength=len(self.buckets) + 1)
        return np.roll(counts, -1)

    def _members(self, dataset: _Dataset, epoch: int, *, shuffled: bool) -> tuple[Ints, Ints]:
        """Return the items and cycles of a dataset's share in an epoch.

        Without `shuffled`, their order does not matter, and complete cycles are not shuffled.
        """
        size = len(dataset.clips)
        per_epoch = size * dataset.repeats
        start, stop = int(epoch * per_epoch), int((epoch + 1) * per_epoch)  # positions in the endless row
        items, cycles = [_ints([])], [_ints([])]
        for cycle in range(start // size, -(-stop // size)):
            first, last = max(start - cycle * size, 0), min(stop - cycle * size, size)
            is_complete = last - first == size
            cycle_items = (
                dataset.clips if is_complete and not shuffled else self._shuffled(dataset.number, cycle)[first:last]
            )
            items.append(cycle_items)
            cycles.append(np.full(len(cycle_items), cycle, dtype=np.int64))
        return np.concatenate(items), np.concatenate(cycles)

    def _shuffle(self, number: int, cycle: int) -> Ints:
        [clips] = [dataset.clips for dataset in self._datasets if dataset.number == number]
        order = list(range(len(clips)))
        # The first dataset is shuffled as if it were alone.
        names = (self.seed, "order", cycle) if number == 0 else (self.seed, "order", number, cycle)
        random.Random(derive_seed(*names)).shuffle(order)
        shuffled: Ints = clips[_ints(order)]
        return shuffled


def cut_into_batches(slots: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut a row of samples into batches of one bucket each, in the order in which they are emitted.

    A batch is emitted at its last sample if that fills it; those that stay open follow in the order of their first.

    Args:
        slots: the bucket of each sample, or -1 if it has none.
        sizes: batch size of each bucket.

    Returns:
        `(members, starts, stops)`: batch k is of the samples `members[starts[k] : stops[k]]`.
    """
    members = np.argsort(slots, kind="stable")
    members = members[np.count_nonzero(slots < 0) :]
    member_slots = slots[members]
    counts = np.bincount(member_slots, minlength=len(sizes))
    rank = np.arange(len(members)) - (np.cumsum(counts) - counts)[member_slots]
    starts = np.flatnonzero(rank % sizes[member_slots] == 0)
    stops = np.append(starts[1:], len(members)) if len(starts) else starts
    full = stops - starts == sizes[member_slots[starts]]
    emitted = np.where(full, members[stops - 1], len(slots) + members[starts])
    turn = np.argsort(emitted)
    return members, starts[turn], stops[turn]


def _thresholds(buckets: Sequence[Bucket], keep: Mapping[Bucket, float]) -> npt.NDArray[np.float64]:
    """Return thresholds of draws: one below the k-th, and not below the one before, comes in bucket k."""
    thresholds: npt.NDArray[np.float64] = np.cumsum(bucket_probabilities(buckets, keep))
    if keep.get(buckets[-1], 1.0) == 1.0:
        thresholds[-1] = 1.0  # without rounding
    return thresholds


def _datasets(clips: Sequence[Clip]) -> list[_Dataset]:
    indices: dict[int, list[int]] = {}
    repeats: dict[int, float] = {}
    for index, clip in enumerate(clips):
        indices.setdefault(clip.dataset, []).append(index)
        if repeats.setdefault(clip.dataset, clip.repeats) != clip.repeats:
            raise InputError(f"clips of dataset {clip.dataset} have different numbers of repeats", "conflict")
    datasets = []
    for number, dataset_indices in sorted(indices.items()):
        fraction = Fraction(repeats[number]).limit_denominator(_MAX_DENOMINATOR)
        if fraction <= 0:
            raise ValueError(
                f"dataset {number} is repeated {repeats[number]} times an epoch; the number must be above 0"
            )
        datasets.append(_Dataset(number, _ints(dataset_indices), fraction))
    return datasets


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)
