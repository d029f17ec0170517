"""Pairs of a preferred and a rejected clip, planned before any weights are loaded. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.data.buckets.buckets import Bucket, bucket_text
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.inspect.batch_counts import count_batches
from finetrainers.data.inspect.item_report import ItemReport
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.probe_all import ProbeOptions
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.reading.items import DataError
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.utils.text import plural

if TYPE_CHECKING:
    from finetrainers.data.loading.bad_samples import BadSample
    from finetrainers.data.loading.batch_sampler import MicroBatch
    from finetrainers.data.loading.loader import RawBatch

#: Columns of the file: the prompt, and the media paths of the preferred and the rejected clip.
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


@dataclass(frozen=True)
class PairPlan(DatasetPlan):
    """The pairs of a run. `clips` and `eval_clips` are the preferred ones; `items` are the files of both columns.

    Attributes:
        rejected: the rejected clip of each pair, by the index of both.
    """

    rejected: Mapping[int, Clip] = field(default_factory=dict)

    noun = "pair"
    fingerprint_of = "files, prompts, buckets or held-out pairs"

    def fetch_with(self, fetch: Callable[[MicroBatch], RawBatch]) -> PairFetch:
        """Fetch the rejected clips with the preferred ones."""
        return PairFetch(fetch, self.rejected)

    def of_clips(self, clips: Sequence[Clip]) -> PairPlan:
        """Return the plan of the pairs that have these preferred clips."""
        rejected = {clip.index: self.rejected[clip.index] for clip in clips}
        return replace(self, clips=tuple(clips), eval_clips=(), rejected=rejected)

    def uses(self) -> tuple[str, list[str]]:
        """Return the use of each pair. Whatever a pair lacks, its preferred clip is not used either."""
        preferred = self.items[: len(self.items) // 2]
        return self.noun, ["rejected" if item.use == "skipped" else item.use for item in preferred]

    def encoded_clips(self) -> list[Clip]:
        """Return all clips that the VAE may encode: both clips of every pair."""
        return [*self.clips, *self.eval_clips, *self.rejected.values()]


def survey_pairs(config: TrainConfig, geometry: Geometry, options: ProbeOptions | None = None) -> PairPlan:
    """Return the plan of a file of pairs, whether it can be trained on or not.

    Raises:
        DataError: the file cannot be read; its `problems` name every line of either column.
    """
    chosen, rejected = _survey_columns(config, geometry, options)
    rejected_clips = {clip.index: clip for clip in rejected.clips}
    bad = dict(_unusable(chosen, rejected, rejected_clips))
    clips = tuple(clip for clip in chosen.clips if clip.index not in bad)
    held_out = tuple(clip for clip in chosen.eval_clips if clip.index not in bad)
    batches = count_batches(clips, config)
    left_out = [f"{plural(len(bad), 'pair')} cannot be used: {'; '.join(bad.values())}"] if bad else []
    remarks = (*left_out, *chosen.remarks)
    return PairPlan(
        **{
            **{entry.name: getattr(chosen, entry.name) for entry in fields(DatasetPlan)},
            "items": tuple(_items(chosen, rejected, bad)),
            "clips": clips,
            "eval_clips": held_out,
            "remarks": remarks,
            "warnings": remarks,
            "batches": batches,
            "fingerprint": hashlib.sha256(
                f"{chosen.fingerprint} {rejected.fingerprint} {sorted(bad)}".encode()
            ).hexdigest(),
            "problem": _problem(config, chosen, bad, has_batches=batches.any),
            "rejected": {clip.index: rejected_clips[clip.index] for clip in (*clips, *held_out)},
        }
    )


def column_config(config: TrainConfig, column: str, buckets: Sequence[Bucket] = ()) -> TrainConfig:
    """Return the configuration of a dataset whose clips are those of one column.

    Args:
        config: configuration of the pairs.
        column: name of the column.
        buckets: buckets of its clips; default: as configured.
    """
    # Every unusable file is reported with its pair; held-out pairs are chosen by the preferred clips.
    changes: dict[str, object] = {
        "video_column": column, "caption_column": PROMPT, "mask_column": "", "max_bad_samples": 10**9,
    }  # fmt: skip
    if config.data.caption_missing is None:  # a comparison does not apply to clips without a prompt
        changes["caption_missing"] = "error"
    if column == REJECTED:
        changes["eval_num_items"] = 0
    if buckets:
        changes |= {
            "video_resolution_buckets": [bucket for bucket in buckets if bucket[0] > 1],
            "image_resolution_buckets": [bucket[1:] for bucket in buckets if bucket[0] == 1],
            "resolutions": [],
            "frame_buckets": [],
        }
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def _survey_columns(
    config: TrainConfig, geometry: Geometry, options: ProbeOptions | None
) -> tuple[DatasetPlan, DatasetPlan]:
    """Survey the files of both columns; an error has the problems of both."""
    plans: list[DatasetPlan] = []
    errors: list[DataError] = []
    for column in (CHOSEN, REJECTED):
        buckets = plans[0].buckets if plans else ()
        try:
            plans.append(survey_dataset(column_config(config, column, buckets), geometry, options=options))
        except DataError as error:
            errors.append(error)
    problems = list(dict.fromkeys(chain.from_iterable(error.problems for error in errors)))
    if problems:
        summary = f"{config.data.dataset_file}: {plural(len(problems), 'problem')}"
        raise DataError(summary, problems, errors[0].kind)
    if errors:
        raise errors[0]
    chosen, rejected = plans
    return chosen, rejected


def _unusable(
    chosen: DatasetPlan, rejected: DatasetPlan, rejected_clips: Mapping[int, Clip]
) -> Iterator[tuple[int, str]]:
    """Yield the index of each pair that cannot be used, and the reason."""
    chosen_clips = {clip.index: clip for clip in (*chosen.clips, *chosen.eval_clips)}
    for index, items in enumerate(zip(chosen.items, rejected.items, strict=True)):
        reasons = [
            f"{column} {item.name}: {item.reason or 'left out'}"
            for column, item in zip((CHOSEN, REJECTED), items, strict=True)
            if item.use in ("rejected", "skipped")
        ]
        if not reasons and items[0].path == items[1].path:
            reasons = [f"{CHOSEN} and {REJECTED} are both {items[0].name}"]
        elif not reasons and chosen_clips[index].bucket != rejected_clips[index].bucket:
            sizes = f"{bucket_text(chosen_clips[index].bucket)} and {bucket_text(rejected_clips[index].bucket)}"
            reasons = [
                f"{items[0].name} and {items[1].name} are in the buckets {sizes}; use clips of the same length and "
                "shape"
            ]
        if reasons:
            yield index, f"{items[0].where}: {'; '.join(reasons)}"


def _items(chosen: DatasetPlan, rejected: DatasetPlan, bad: Mapping[int, str]) -> Iterator[ItemReport]:
    """Yield the reports of the files of both columns; those of a pair that cannot be used are marked as skipped."""
    for number, item in enumerate((*chosen.items, *rejected.items)):
        reason = bad.get(number % len(chosen.items))
        if reason is not None and item.use not in ("rejected", "skipped"):
            item = replace(item, use="skipped", status="skipped", bucket=None, fps=None, reason=f"its pair: {reason}")
        yield replace(item, index=number)


def _problem(
    config: TrainConfig, chosen: DatasetPlan, bad: Mapping[int, str], *, has_batches: bool
) -> DataError | None:
    """Return why the pairs cannot be trained on, or None if they can."""
    total, allowed = len(chosen.items), config.data.max_bad_samples
    if len(bad) > allowed:
        remedy = f"; leave them out with --max_bad_samples {len(bad)}" if len(bad) < total else ""
        return DataError(f"{len(bad)} of {plural(total, 'pair')} cannot be used{remedy}", list(bad.values()))
    if chosen.problem is not None:
        return chosen.problem
    if not has_batches:
        message = "nothing to train on: no bucket has pairs for a full batch; lower --batch_size"
        return DataError(message, kind="too_large")
    return None


@dataclass(frozen=True)
class PairFetch:
    """Fetcher of micro-batches that adds the rejected clip of each pair: rows 2k and 2k + 1 are a pair.

    Both have the sample key of the pair, and so equal noise and noise level. A pair with an unreadable clip is replaced
    as a whole.

    Attributes:
        inner: fetches clips.
        rejected: see `PairPlan`.
    """

    inner: Callable[[MicroBatch], RawBatch]
    rejected: Mapping[int, Clip]

    def __call__(self, batch: MicroBatch) -> RawBatch:
        preferred = list(batch.clips)
        bad: tuple[BadSample, ...] = ()
        cycles = tuple(cycle for cycle, _ in batch.sample_keys for _ in range(2))
        for _ in self.rejected:
            requested = tuple(clip for chosen in preferred for clip in (chosen, self.rejected[chosen.index]))
            raw = self.inner(replace(batch, clips=requested, cycles=cycles))
            bad += raw.bad
            pairs = [(requested[k : k + 2], raw.clips[k : k + 2]) for k in range(0, len(requested), 2)]
            if all(pair == fetched for pair, fetched in pairs):
                return replace(raw, bad=bad, sample_keys=tuple(key for key in batch.sample_keys for _ in range(2)))
            # A replacement of either clip is a preferred clip, which stands for its pair.
            preferred = [next((clip for clip in fetched if clip not in pair), pair[0]) for pair, fetched in pairs]
        raise InvalidSampleError(f"no pair of this size can be read: {bad[-1].reason}")
