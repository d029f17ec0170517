"""Bad samples: clips that fail to load during training are replaced, counted, and limited in number."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from finetrainers.parallel.ranks import Ranks
from finetrainers.utils.failures import ExpectedError
from finetrainers.utils.faults import fault_point

from ..buckets.buckets import Bucket
from ..buckets.clip import Clip
from ..cache.store import CacheError
from ..reading.sources.rows import shown
from ..reading.status import UnusableError
from .batch_sampler import MicroBatch
from .workers import note_reading

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: What a clip's own file, or its entry in the cache, can fail with.
PROBLEMS = (UnusableError, CacheError, OSError)
#: If the file system is unreachable, every clip fails; so only a few substitutes are tried.
_MOST_TRIED = 8


class BadSamplesError(ExpectedError, RuntimeError):
    """More clips turned out unusable while training than are allowed."""


@dataclass(frozen=True)
class BadSample:
    """A clip that could not be loaded twice in a row, and why."""

    clip: Clip
    reason: str


class Substitutes:
    """Substitutes of an unusable clip: the next ones of its bucket, in the order of the dataset.

    It follows from the clip alone, so that it is the same on every rank, in every worker, and at every world size.
    Clips of the same file are left out: a window is no substitute for another one of a file that cannot be read.

    Attributes:
        unusable: files that count as unusable whether they can be loaded or not, and why.
    """

    def __init__(self, clips: Sequence[Clip]) -> None:
        self.unusable: Mapping[Path, str] = {}
        self._by_bucket: dict[Bucket, list[Clip]] = defaultdict(list)
        for clip in sorted(clips, key=lambda clip: clip.index):
            self._by_bucket[clip.bucket].append(clip)

    def after(self, clip: Clip) -> Iterator[Clip]:
        """The bucket's clips of other files, beginning with the next."""
        alike = self._by_bucket[clip.bucket]
        following = bisect_right(alike, clip.index, key=lambda other: other.index)
        order = chain(range(following, len(alike)), range(following))
        return (alike[place] for place in order if alike[place].path != clip.path)


def load_clips(
    batch: MicroBatch, load: Callable[[Clip, tuple[int, int]], T], *, substitutes: Substitutes | None
) -> tuple[tuple[Clip, ...], list[T], tuple[BadSample, ...]]:
    """Load a micro-batch clip by clip, with one retry each; return the clips that were used in the end.

    A substitute is loaded with the sample key of the clip that it stands for, so that within an epoch it does not meet
    the same noise twice.

    Args:
        batch: what is wanted.
        load: loads one clip for a sample key.
        substitutes: what takes the place of unusable clips; None: they are errors.

    Raises:
        UnusableError, CacheError, OSError: an unusable clip for which there is no substitute.
    """
    fault_point("data")
    used: list[Clip] = []
    loaded: list[T] = []
    bad: list[BadSample] = []
    for wanted, key in zip(batch.clips, batch.sample_keys, strict=True):
        others = islice(substitutes.after(wanted), _MOST_TRIED) if substitutes is not None else iter(())
        clip: Clip | None = wanted
        while clip is not None:
            note_reading(clip)
            try:
                if substitutes is not None and clip.path in substitutes.unusable:
                    raise UnusableError(substitutes.unusable[clip.path])
                loaded.append(twice(load, clip, key))
                used.append(clip)
                break
            except PROBLEMS as error:
                following = next(others, None)
                if following is None:
                    raise
                bad.append(BadSample(clip, str(error)))
                clip = following
    return tuple(used), loaded, tuple(bad)


def twice(load: Callable[..., T], *arguments: Any) -> T:
    """Call a function, and retry it once: a network file system may just have been busy."""
    try:
        return load(*arguments)
    except PROBLEMS:
        return load(*arguments)


class BadSampleTracker:
    """Which files of a run were unusable, the same on every rank."""

    def __init__(self, *, parallel: Ranks, share: float, num_files: int) -> None:
        """Args:
        parallel: the processes of the run.
        share: of the files that may be unusable; at least one may, unless the share is 0.
        num_files: how many there are.
        """
        self.parallel = parallel
        self.share = share
        self.allowed = max(1, int(share * num_files)) if share else 0
        self.known: dict[Path, BadSample] = {}
        self.events: list[dict[str, Any]] = []

    def agree(self, found: Sequence[BadSample], error: Exception | None) -> bool:
        """Share the bad samples of this rank's step with all ranks; every rank must call it for every step.

        This is a message of its own, and not a part of the one at the end of the step: a rank without a batch would not join
        the collectives of forward and backward, and ranks that share a clip must have the same one before they compute.

        Returns:
            Whether there were any that ranks should compare: new ones, or any at all where ranks share their samples.

        Raises:
            BadSamplesError: there are too many, on any ranks together.
            Exception: what kept any rank from loading; on every rank.
        """
        new = [one for one in found if one.clip.path not in self.known]
        tells = found if self.parallel.sharing > 1 else new
        worst = self.parallel.max_on_host([2 if error is not None else 1 if tells else 0])[0]
        if worst == 2:
            self.parallel.raise_if_any_failed(error, "loading a batch")
        if worst == 0:
            return False
        for one in self.parallel.gather_objects(new):
            if one.clip.path in self.known:
                continue
            self.known[one.clip.path] = one
            path = str(one.clip.path)
            self.events.append({"kind": "bad_sample", "file": path, "reason": one.reason})
            logger.warning(
                "%s cannot be used, the next clip of its bucket takes its place: %s", shown(path), one.reason
            )
        if len(self.known) > self.allowed:
            files = "; ".join(sorted(one.reason for one in self.known.values()))
            raise BadSamplesError(
                f"{len(self.known)} clips turned out unusable while training, more than the {self.allowed} that "
                f"--max_bad_share {self.share:g} allows: {files}. Repair or remove the files, or raise the share"
            )
        return True
