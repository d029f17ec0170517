"""The dataset plan: a status for every item, and the training clips. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetrainers.config.root import TrainConfig, critical_options
from finetrainers.utils.files import write_json_lines_atomic, write_text_atomic
from finetrainers.utils.text import plural

from ..buckets.buckets import Bucket, bucket_text, sample_size
from ..buckets.clip import Clip, TextImageSource, all_cuts
from ..buckets.windows import encoded_clip, encoded_clips
from ..reading.items import DataError
from ..reading.prior_prompts import PriorPrompts
from .batch_counts import BatchCounts
from .item_report import ItemReport, crop_loss, is_enlarged

#: Options that determine the training clips; a resumed run must have the same values, and the same fingerprint.
CRITICAL: Mapping[str, str | None] = critical_options("data")
#: The ones in the fingerprint of several datasets, which must not change. More recent options of an entire run are
#: compared without it.
FINGERPRINTED = tuple(name for name in CRITICAL if name != "sliding_window_batching")


@dataclass(frozen=True)
class DatasetPlan:
    """The status of every item and the training clips, decided before any weight is loaded.

    The same data and options give the same plan on every machine and every rank.

    Attributes:
        items: a report on every item, in order.
        clips: training clips, in order of the items.
        eval_clips: clips held out for the evaluation loss.
        buckets: the buckets in use, configured or chosen.
        notes: messages about automatic decisions.
        remarks: warnings that are not in the reports on items, each with a count.
        warnings: all warnings, each with a count.
        batches: of an epoch.
        fingerprint: hex digest that changes with any file, caption or bucket, and with the held-out items; stored with
            checkpoints.
        chosen: options, by flat name, that list the buckets which this run, or the one that it resumes, has chosen from
            its clips; empty if the user has listed them.
        problem: the reason why it cannot be trained on, or None if it can.
        dataset_toml: the file of several datasets, if they came from one.
        prior: the prior prompts of samples, or None if there are none.
    """

    items: tuple[ItemReport, ...]
    clips: tuple[Clip, ...]
    eval_clips: tuple[Clip, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...]
    remarks: tuple[str, ...]
    warnings: tuple[str, ...]
    batches: BatchCounts
    fingerprint: str
    chosen: Mapping[str, Any] = field(default_factory=dict)
    problem: DataError | None = None
    dataset_toml: str | None = None
    prior: PriorPrompts | None = None

    noun = "clip"
    fingerprint_of = "files, captions, buckets, repeats or held-out items"
    critical_options = CRITICAL
    cut_in_batches = True
    title = "data"
    encodes_clips = True
    images = ()
    texts = "captions"

    def checked(self) -> DatasetPlan:
        """Return this plan if it can be trained on.

        Raises:
            DataError: too many items cannot be used, or no clip is left to train on.
        """
        if self.problem is not None:
            raise self.problem
        return self

    @property
    def count(self) -> int:
        """The number of training clips."""
        return len(self.clips)

    def uses(self) -> tuple[str, list[str]]:
        """Return the name of what the data lists, and the use of each, as in the reports on items."""
        return "item", [item.use for item in self.items]

    @property
    def size(self) -> Bucket:
        """The default size of samples, `(frames, height, width)`; see `sample_size`."""
        return sample_size(Counter(clip.bucket for clip in self.clips), has_chosen_buckets=bool(self.chosen))

    def heaviest(self, config: TrainConfig) -> tuple[Bucket, int]:
        """Return the bucket whose batches have most pixels, and the number of clips in each."""
        sizes, default = dict(config.dataloader.bucket_batch_sizes), config.dataloader.batch_size
        buckets = {bucket for clip in self.clips for bucket in clip.buckets}
        batches = [(bucket, sizes.get(bucket, default)) for bucket in buckets]
        return max(batches, key=lambda batch: (math.prod(batch[0]) * batch[1], batch))

    @property
    def example(self) -> str:
        """The caption of the first clip."""
        return self.clips[0].caption

    @property
    def rates(self) -> list[float]:
        """The frame rates of the training videos."""
        return [item.fps for item in self.items if item.use == "train" and item.kind == "video" and item.fps]

    def write(self, path: Path) -> None:
        """Write the items, one JSON object per line, and next to them the file of several datasets."""
        if self.dataset_toml is not None:
            write_text_atomic(path.with_name("dataset.toml"), self.dataset_toml)
        write_json_lines_atomic(path, (item.record() for item in self.items))

    def step_of(self, config: TrainConfig) -> str:
        """Return a text about the number of clips in an optimizer step."""
        loading, accumulation = config.dataloader, config.training.gradient_accumulation_steps
        batch_sizes = sorted({loading.batch_size, *(size for _, size in loading.bucket_batch_sizes)})
        counts = [size * accumulation for size in batch_sizes]
        if config.data.sliding_window_batching == "clip":
            return f"all windows of {' or '.join(map(str, counts))} clips per {config.parallel.unit}"
        if len(counts) == 1:
            return f"{plural(counts[0], self.noun)} per {config.parallel.unit}"
        return f"{' or '.join(map(str, counts))} {self.noun}s per {config.parallel.unit}, by bucket"

    def fetch_with(self, fetch: Any) -> Any:
        """Return the fetcher of micro-batches: `fetch`, or a wrapper that adds the clips that belong to the batch's."""
        return fetch

    def of_clips(self, clips: Sequence[Clip]) -> DatasetPlan:
        """Return the plan of only these training clips, without held-out clips."""
        return replace(self, clips=tuple(clips), eval_clips=())

    def encoded_clips(self) -> list[Clip]:
        """Return all clips that the VAE may encode: in every bucket, and each segment that windows share once."""
        return list(encoded_clips((*all_cuts(self.clips), *self.eval_clips)))

    @property
    def needs_empty_text(self) -> bool:
        """True if the empty prompt must be encoded, as caption dropout needs it."""
        return True

    def all_captions(self) -> list[str]:
        """Return all captions that may be encoded, and all prior prompts."""
        captions = [caption for clip in (*self.clips, *self.eval_clips) for caption in clip.all_captions]
        return captions if self.prior is None else [*captions, *self.prior.texts_for(captions)]

    def shown_texts(self) -> list[tuple[str, TextImageSource]]:
        """Return every caption with each clip that it may be encoded with, where text encoders see the first frame."""
        clips = (*all_cuts(self.clips), *self.eval_clips)
        return [(caption, encoded_clip(clip)) for clip in clips for caption in clip.all_captions]

    def bucket_rows(self) -> list[dict[str, Any]]:
        """Return a row for each bucket in use, largest first; clips also count in buckets that they may fall to."""
        train: dict[Bucket, list[Clip]] = defaultdict(list)
        held_out: dict[Bucket, list[Clip]] = defaultdict(list)
        for clips, by_bucket in ((all_cuts(self.clips), train), (self.eval_clips, held_out)):
            for clip in clips:
                by_bucket[clip.bucket].append(clip)
        rows = []
        for bucket in sorted({*train, *held_out}, reverse=True):
            clips = [*train[bucket], *held_out[bucket]]
            rates = [clip.fps for clip in clips]
            rows.append({
                "bucket": bucket_text(bucket),
                "clips": len(train[bucket]),
                "held_out": len(held_out[bucket]),
                "batches": self.batches.by_bucket.get(bucket, "0"),
                "enlarged": sum(is_enlarged(clip) for clip in clips),
                "crop": round(sum(map(crop_loss, clips)) / len(clips), 4),
                "fps": [min(rates), max(rates)],
            })  # fmt: skip
        return rows

    def table(self) -> list[tuple[str, ...]]:
        """Return a table for printing: a row of headings, then one for each bucket, largest first."""
        rows: list[tuple[str, ...]] = [("bucket", f"{self.noun}s", "batches", "held out", "fps")]
        for row in self.bucket_rows():
            rates = dict.fromkeys(f"{round(rate, 2):g}" for rate in row["fps"])
            rows.append((row["bucket"], str(row["clips"]), row["batches"], str(row["held_out"]), "-".join(rates)))
        return rows
