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

from finetrainers.parallel.ranks import DistributedContext
from finetrainers.utils.failures import ExpectedError
from finetrainers.utils.faults import fault_point

from ..buckets.buckets import Bucket
from ..buckets.clip import Clip
from ..cache.store import CacheError
from ..reading.sources.rows import printable_name
from ..reading.status import InvalidSampleError
from .batch_sampler import MicroBatch
from .workers import note_reading

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Errors that a clip's file, or its entry in the cache, can raise.
PROBLEMS = (InvalidSampleError, CacheError, OSError)
#: Only a few substitutes are tried, since every clip fails if the file system is unreachable.
_MAX_SUBSTITUTES = 8


class BadSamplesError(ExpectedError, RuntimeError):
    """A larger number of unusable clips in training than is allowed."""


@dataclass(frozen=True)
class BadSample:
    """A clip that could not be loaded twice in a row, and the reason."""

    clip: Clip
    reason: str


class ReplacementClips:
    """Substitutes of an unusable clip: the next ones of its bucket, in the order of the dataset.

    They depend only on the clip, so that they are the same on every rank, in every worker, and at every world size.
    Clips of the same file are left out: a window cannot replace another window of a file that cannot be read.

    Attributes:
        unusable: the reasons of files that count as unusable even if they can be loaded.
    """

    def __init__(self, clips: Sequence[Clip]) -> None:
        self.unusable: Mapping[Path, str] = {}
        self._by_bucket: dict[Bucket, list[Clip]] = defaultdict(list)
        for clip in sorted(clips, key=lambda clip: clip.index):
            self._by_bucket[clip.bucket].append(clip)

    def after(self, clip: Clip) -> Iterator[Clip]:
        """Return the bucket's clips of other files, beginning with the next."""
        clips = self._by_bucket[clip.bucket]
        following = bisect_right(clips, clip.index, key=lambda other: other.index)
        order = chain(range(following, len(clips)), range(following))
        return (clips[index] for index in order if clips[index].path != clip.path)


def load_clips(
    batch: MicroBatch, load: Callable[[Clip, tuple[int, int]], T], *, substitutes: ReplacementClips | None
) -> tuple[tuple[Clip, ...], list[T], tuple[BadSample, ...]]:
    """Load a micro-batch clip by clip, with one retry each; return the clips that were loaded, and the bad samples.

    A substitute is loaded with the sample key of the clip that it replaces, so that within an epoch it does not get the
    same noise twice.

    Args:
        batch: the micro-batch.
        load: loads one clip for a sample key.
        substitutes: replacements of unusable clips, or None if such clips are errors.

    Raises:
        InvalidSampleError, CacheError, OSError: an unusable clip has no substitute.
    """
    fault_point("data")
    loaded_clips: list[Clip] = []
    loaded: list[T] = []
    bad_samples: list[BadSample] = []
    for requested, key in zip(batch.clips, batch.sample_keys, strict=True):
        replacements = islice(substitutes.after(requested), _MAX_SUBSTITUTES) if substitutes is not None else iter(())
        clip: Clip | None = requested
        while clip is not None:
            note_reading(clip)
            try:
                if substitutes is not None and clip.path in substitutes.unusable:
                    raise InvalidSampleError(substitutes.unusable[clip.path])
                loaded.append(call_with_retry(load, clip, key))
                loaded_clips.append(clip)
                break
            except PROBLEMS as error:
                following = next(replacements, None)
                if following is None:
                    raise
                bad_samples.append(BadSample(clip, str(error)))
                clip = following
    return tuple(loaded_clips), loaded, tuple(bad_samples)


def call_with_retry(load: Callable[..., T], *arguments: Any) -> T:
    """Call a function, and retry it once: a network file system may just have been busy."""
    try:
        return load(*arguments)
    except PROBLEMS:
        return load(*arguments)


class BadSampleTracker:
    """The files of a run that were unusable, the same on every rank."""

    def __init__(self, *, parallel: DistributedContext, share: float, num_files: int) -> None:
        """Args:
        parallel: the processes of the run.
        share: of the files that may be unusable; at least one may, unless the share is 0.
        num_files: number of files.
        """
        self.parallel = parallel
        self.share = share
        self.allowed = max(1, int(share * num_files)) if share else 0
        self.by_path: dict[Path, BadSample] = {}
        self.events: list[dict[str, Any]] = []

    def agree(self, samples: Sequence[BadSample], error: Exception | None) -> bool:
        """Share the bad samples of this rank's step with all ranks; every rank must call it for every step.

        It is a separate message, and not a part of the one at the end of the step: a rank without a batch would not
        join the collectives of forward and backward, and ranks that share a clip must have the same one before they
        compute.

        Returns:
            Whether ranks should compare their samples: there are new bad ones, or any if ranks share their samples.

        Raises:
            BadSamplesError: there are too many, over all ranks.
            Exception: the error that kept a rank from loading; on every rank.
        """
        new = [sample for sample in samples if sample.clip.path not in self.by_path]
        reported = samples if self.parallel.sharing > 1 else new
        worst = self.parallel.max_on_host([2 if error is not None else 1 if reported else 0])[0]
        if worst == 2:
            self.parallel.raise_if_any_failed(error, "loading a batch")
        if worst == 0:
            return False
        for sample in self.parallel.gather_objects(new):
            if sample.clip.path in self.by_path:
                continue
            self.by_path[sample.clip.path] = sample
            path = str(sample.clip.path)
            self.events.append({"kind": "bad_sample", "file": path, "reason": sample.reason})
            logger.warning(
                "%s is unusable; the next clip of its bucket replaces it: %s",
                printable_name(path),
                sample.reason,
            )
        if len(self.by_path) > self.allowed:
            files = "; ".join(sorted(sample.reason for sample in self.by_path.values()))
            raise BadSamplesError(
                f"{len(self.by_path)} clips became unusable while training, more than the {self.allowed} that "
                f"--max_bad_share {self.share:g} allows: {files}. Repair or remove the files, or raise "
                "--max_bad_share"
            )
        return True
