"""Decides, before any weight is loaded, what becomes of every item: its bucket, or why it cannot be used.

Imports no torch. The same data and options give the same plan on every machine and every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import plural

from .buckets import Bucket
from .clip import Clip
from .dataset import Dataset, read_datasets, repeats_of
from .frames import is_slower
from .manifest import Reading, read_dataset
from .placing import Placed, Probed, place_items
from .sources.rows import DataError, counted

#: Options that decide what is cut from the clips, beside the fingerprint; `--reset data` allows others.
_CRITICAL: Mapping[str, str | None] = dict.fromkeys(("target_fps", "frame_selection", "video_reshape_mode"), "data")


@dataclass(frozen=True)
class Verdict:
    """What becomes of one item. `bucket` and `fps` are None, and `reason` is given, when it is rejected."""

    index: int
    name: str
    path: Path
    caption: str
    use: Literal["train", "eval", "rejected"]
    size_bytes: int
    bucket: Bucket | None = None
    fps: float | None = None
    reason: str | None = None
    captions: tuple[str, ...] = ()
    dataset: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """The verdict as plain values, one line of `manifest.jsonl`; several captions, data set and columns if there are."""
        bucket = "x".join(map(str, self.bucket)) if self.bucket else None
        values = {**self.__dict__, "path": str(self.path), "bucket": bucket}
        return {name: value for name, value in values.items() if value or name not in ("captions", "dataset", "extra")}


@dataclass(frozen=True)
class DatasetPlan:
    """The data set as it will be trained on.

    Attributes:
        clips: training clips, in order of the data set.
        eval_clips: clips held out for the evaluation loss.
        verdicts: one for every item.
        buckets: the buckets in use, given or chosen.
        warnings: what the user should know, each with a count.
        notes: what was decided for the user.
        fingerprint: hex digest that changes with any file, caption or bucket; kept with checkpoints.
        dataset_toml: the file of several data sets, if they came from one.
    """

    clips: tuple[Clip, ...]
    eval_clips: tuple[Clip, ...]
    verdicts: tuple[Verdict, ...]
    buckets: tuple[Bucket, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str
    dataset_toml: str | None = None

    noun = "clip"
    fingerprint_of = "files, captions, buckets or held-out items"
    critical_options = _CRITICAL
    cut_in_batches = True
    title = "data"
    beside_memory = ""

    @property
    def count(self) -> int:
        """How many clips are trained on."""
        return len(self.clips)

    @property
    def size(self) -> Bucket:
        """The training bucket with most pixels, `(frames, height, width)`."""
        return max((clip.bucket for clip in self.clips), key=lambda b: b[0] * b[1] * b[2])

    @property
    def example(self) -> str:
        """Caption of the first clip."""
        return self.clips[0].caption

    @property
    def fps(self) -> float:
        """Frame rate of the first clip."""
        return self.clips[0].fps

    def write(self, path: Path) -> None:
        """Write the verdicts, one JSON object a line; and beside them the file of several data sets."""
        if self.dataset_toml is not None:
            write_text_atomic(path.with_name("dataset.toml"), self.dataset_toml)
        lines = [json.dumps(verdict.record(), ensure_ascii=False) for verdict in self.verdicts]
        write_text_atomic(path, "\n".join(lines) + "\n")

    def step_of(self, config: TrainConfig) -> str:
        """Clips of an optimizer step."""
        return f"{config.dataloader.batch_size * config.training.gradient_accumulation_steps} clips per process"

    def table(self) -> list[tuple[str, str, str, str]]:
        """For printing: a row of headings, then one for each bucket, largest first."""
        rows = [("bucket", "clips", "held out", "fps")]
        for bucket in sorted({clip.bucket for clip in (*self.clips, *self.eval_clips)}, reverse=True):
            train = [clip for clip in self.clips if clip.bucket == bucket]
            held_out = [clip for clip in self.eval_clips if clip.bucket == bucket]
            rates = sorted({round(clip.fps, 2) for clip in (*train, *held_out)})
            shown = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g}-{rates[-1]:g}"
            rows.append(("x".join(map(str, bucket)), str(len(train)), str(len(held_out)), shown))
        return rows


def plan_clips(config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> DatasetPlan | None:
    """The plan of the configured data set; None where none is named, or where no clip can be placed.

    Raises:
        DataError: see `plan_dataset`.
    """
    if not config.data.is_named:
        return None
    if sizes_are_wrong:  # whether the data is there can still be said
        _read_all(read_datasets(config.data), media_dir(config))
        return None
    return plan_dataset(config, geometry)


def plan_dataset(config: TrainConfig, geometry: Geometry) -> DatasetPlan:
    """Read, probe and bucket the whole data set.

    Clips are sampled at `target_fps`, by default the model's own rate, and slower clips at their own. Held-out items
    are chosen by a hash of name and caption, so adding data does not reshuffle them.

    Raises:
        DataError: wrong metadata, illegal buckets, more than `max_bad_samples` unusable files, or nothing to train on.
    """
    data = config.data
    datasets = read_datasets(data)
    readings = _read_all(datasets, media_dir(config))
    items = [item for reading in readings for item in reading.items]
    names = _names(datasets, readings)
    parts, notes = _place_all(datasets, readings, geometry)
    reasons = {index: reason for part in parts for index, reason in part.reasons.items()}
    rejected = [f"{names[items[index].path]}: {reason}" for index, reason in reasons.items()]
    if len(rejected) > data.max_bad_samples:
        allowed = f" and `max_bad_samples` allows {data.max_bad_samples}"
        raise DataError(f"{len(rejected)} of {plural(len(items), 'item')} cannot be used{allowed}", rejected)

    name = names.__getitem__
    clips = [clip for part in parts for clip in part.clips]
    held_out = _hold_out(clips, data.eval_num_items, name)
    counts = [sum(clip.index not in held_out for clip in part.clips) for part in parts]
    repeats = repeats_of(datasets, counts)
    # A held-out item is evaluated with its first caption: another one would change what the loss is of.
    clips = [
        replace(clip, captions=()) if clip.index in held_out else replace(clip, repeats=repeats[clip.dataset])
        for clip in clips
    ]
    by_index = {clip.index: clip for clip in clips}
    verdicts = tuple(
        _verdict(entry, by_index.get(entry.item.index), held_out, reasons, name, dataset.name)
        for dataset, part in zip(datasets, parts, strict=True)
        for entry in part.probed
    )
    warnings = [
        f"{_prefix(d)}{text}" for d, r in zip(datasets, readings, strict=True) for text in (*d.warnings, *r.warnings)
    ]
    for dataset, part in zip(datasets, parts, strict=True):
        lost = [f"{names[items[index].path]}: {reason}" for index, reason in part.reasons.items()]
        target_fps = dataset.data.target_fps or geometry.fps
        warnings += [f"{_prefix(dataset)}{text}" for text in _warnings(part.clips, lost, name, target_fps=target_fps)]
    return DatasetPlan(
        clips=tuple(clip for clip in clips if clip.index not in held_out),
        eval_clips=tuple(clip for clip in clips if clip.index in held_out),
        verdicts=verdicts,
        buckets=tuple(dict.fromkeys(bucket for part in parts for bucket in part.buckets)),
        warnings=tuple(warnings),
        notes=tuple(notes),
        fingerprint=_fingerprint(verdicts, datasets, repeats),
        dataset_toml=None if data.dataset is None else data.dataset.read_text(encoding="utf-8-sig"),
    )


def media_dir(config: TrainConfig) -> Path:
    """Where media are unpacked that come in tars and parquet files: beside the precomputed tensors."""
    return (config.data.precompute_dir or config.run.output_dir / "precomputed") / "media"


def _read_all(datasets: Sequence[Dataset], media: Path) -> list[Reading]:
    """The data sets' items, numbered through.

    Raises:
        DataError: what is wrong with any of them.
    """
    readings: list[Reading] = []
    problems: list[str] = []
    count = 0
    for dataset in datasets:
        try:
            reading = read_dataset(dataset.data, media_dir=media, first=count)
            reading.check()
        except DataError as error:
            if len(datasets) == 1 and not dataset.name:
                raise
            problems += [f"{_prefix(dataset)}{text}" for text in error.problems or [str(error)]]
            continue
        readings.append(reading)
        count += len(reading.items)
    if problems:
        raise DataError(f"data sets that cannot be used: {plural(len(problems), 'problem')}", problems)
    return readings


def _place_all(
    datasets: Sequence[Dataset], readings: Sequence[Reading], geometry: Geometry
) -> tuple[list[Placed], list[str]]:
    """What is cut from each data set, and notes."""
    parts: list[Placed] = []
    notes: list[str] = []
    for number, (dataset, reading) in enumerate(zip(datasets, readings, strict=True)):
        data, rounded = dataset.cut_for(geometry)
        try:
            part = place_items(reading.items, data=data, geometry=geometry)
        except DataError as error:
            raise DataError(f"{_prefix(dataset)}{error}") from error
        parts.append(replace(part, clips=[replace(clip, dataset=number) for clip in part.clips]))
        notes += [f"{_prefix(dataset)}{note}" for note in (*rounded, *part.notes)]
    return parts, notes


def _prefix(dataset: Dataset) -> str:
    return f"{dataset.name}: " if dataset.name else ""


def _names(datasets: Sequence[Dataset], readings: Sequence[Reading]) -> dict[Path, str]:
    """What messages call each file: its name in its data set, which does not depend on the machine."""
    return {
        item.path: f"{dataset.name}/{item.name}" if dataset.name else item.name
        for dataset, reading in zip(datasets, readings, strict=True)
        for item in reading.items
    }


def _hold_out(clips: Sequence[Clip], count: int, name: Callable[[Path], str]) -> set[int]:
    """Indices of the evaluation clips."""
    if count and count >= len(clips):
        raise DataError(
            f"`eval_num_items` {count} leaves nothing to train on: there are {plural(len(clips), 'usable item')}"
        )
    if not clips:
        raise DataError("no usable item")

    def digest(clip: Clip) -> bytes:
        return hashlib.sha256(f"{name(clip.path)}\0{clip.caption}".encode()).digest()

    return {clip.index for clip in sorted(clips, key=digest)[:count]}


def _verdict(
    entry: Probed,
    clip: Clip | None,
    held_out: set[int],
    reasons: dict[int, str],
    name: Callable[[Path], str],
    dataset: str,
) -> Verdict:
    item = entry.item
    use: Literal["train", "eval", "rejected"] = "train"
    if clip is None:
        use = "rejected"
    elif clip.index in held_out:
        use = "eval"
    return Verdict(
        item.index,
        name(item.path),
        item.path,
        item.caption,
        use,
        entry.size_bytes,
        bucket=clip.bucket if clip else None,
        fps=clip.fps if clip else None,
        reason=reasons.get(item.index),
        captions=item.captions if len(item.captions) > 1 else (),
        dataset=dataset,
        extra=item.extra,
    )


def _fingerprint(verdicts: Sequence[Verdict], datasets: Sequence[Dataset], repeats: Sequence[float]) -> str:
    digest = hashlib.sha256()
    for v in verdicts:
        others = [list(v.captions)] if v.captions else []
        digest.update(json.dumps([v.name, v.size_bytes, v.caption, v.bucket, v.use, *others]).encode() + b"\n")
    for dataset, times in zip(datasets, repeats, strict=True):
        if dataset.name:  # of a data set that has options of its own, those that the run's cannot tell
            own = [dataset.name, times, *(getattr(dataset.data, option) for option in _CRITICAL)]
            digest.update(json.dumps(own).encode() + b"\n")
    return digest.hexdigest()


def _warnings(
    clips: Sequence[Clip], rejected: Sequence[str], name: Callable[[Path], str], *, target_fps: float
) -> list[str]:
    """One sentence for each kind of oddity, with a count and the first names."""
    videos = [clip for clip in clips if clip.kind == "video"]
    captions = Counter((clip.path, clip.all_captions) for clip in clips)
    kinds: list[tuple[str, list[str]]] = [
        ("cannot be used and left out", list(rejected)),
        ("without a caption", [name(clip.path) for clip in clips if not clip.caption]),
        (
            f"slower than {target_fps:g} fps and trained at their own rate",
            [f"{name(c.path)} ({c.source_fps:.4g} fps)" for c in videos if is_slower(c.source_fps, target_fps)],
        ),
        (
            "smaller than their bucket and enlarged",
            [name(c.path) for c in clips if c.height < c.bucket[1] or c.width < c.bucket[2]],
        ),
        ("listed more than once", [name(path) for (path, _), count in captions.items() if count > 1]),
    ]
    return [counted(names, what) for what, names in kinds if names]
