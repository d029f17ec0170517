"""Surveys the data of a run and makes its plan: a status for every item, and the training clips. Imports no torch."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.utils.gc_pause import gc_paused
from finetrainers.utils.text import plural

from ..buckets.bucket_choice import named_buckets
from ..buckets.buckets import bucket_text
from ..buckets.clip import Clip, cut_to
from ..buckets.frames import is_slower
from ..buckets.windows import apart, first_of_items, item_of
from ..reading.datasets import Dataset, media_dir, read_all, read_datasets, repeats_of
from ..reading.items import DataError, Reading
from ..reading.sources.rows import counted, shown
from .assign_buckets import Part, assign_buckets
from .batch_counts import count_batches
from .item_report import ItemReport, is_enlarged, report_item, scale_of
from .plan import CRITICAL, DatasetPlan
from .probe_all import ProbeOptions


def plan_dataset(config: TrainConfig, geometry: Geometry) -> DatasetPlan:
    """Read, probe and bucket all data of a run.

    Clips are sampled at `target_fps`, by default the model's own rate, and slower clips at their own. Held-out items
    are chosen by a hash of name and caption, so adding data does not reshuffle them. With sliding windows an item is
    held out with all of them, and evaluated on those that do not overlap.

    Raises:
        DataError: wrong metadata, illegal buckets, more than `max_bad_samples` unusable files, or nothing to train on.
    """
    return survey_dataset(config, geometry).checked()


def survey_dataset(config: TrainConfig, geometry: Geometry, *, options: ProbeOptions | None = None) -> DatasetPlan:
    """The plan of the configured data, whether it can be trained on or not.

    Args:
        config: names the data.
        geometry: which sizes the model takes, and its frame rate.
        options: how closely to look at the files; None: their headers, unless facts are stored.

    Raises:
        DataError: wrong metadata, or illegal buckets.
    """
    with gc_paused():
        return _survey(config, geometry, options or ProbeOptions())


def _survey(config: TrainConfig, geometry: Geometry, options: ProbeOptions) -> DatasetPlan:
    data = config.data
    datasets = read_datasets(data)
    readings = read_all(datasets, media_dir(config))
    names = [item.name for reading in readings for item in reading.items]
    parts = [
        _part(dataset, reading, number, geometry, options)
        for number, (dataset, reading) in enumerate(zip(datasets, readings, strict=True))
    ]
    buckets = tuple(dict.fromkeys(bucket for part in parts for bucket in part.buckets))
    named_buckets("bucket_keep_prob", data.bucket_keep_prob, buckets)
    named_buckets("bucket_batch_sizes", config.dataloader.bucket_batch_sizes, buckets)
    held_out, problem = frozenset[int](), None
    try:
        firsts = first_of_items(clip for part in parts for clip in part.clips)
        held_out = frozenset(_hold_out(firsts, data.eval_num_items, names))
    except DataError as error:
        problem = error
    clips, evaluated, repeats = _share_out(parts, held_out)
    items = tuple(_reports(parts, (*clips, *evaluated), held_out, names))
    batches = count_batches(clips, config)
    problem = _too_many_unusable(items, data.max_bad_samples) or problem
    if problem is None and not batches.any:
        problem = DataError(
            "nothing to train on: no bucket has clips for a whole batch; lower --batch_size, or leave out --epoch_end drop"
        )
    remarks = (*_remarks(parts, names), *batches.warnings)
    return DatasetPlan(
        items=items,
        clips=tuple(clips),
        eval_clips=tuple(evaluated),
        buckets=buckets,
        notes=(
            *(f"{part.dataset.prefix}{note}" for part in parts for note in part.notes),
            *_unused(parts),
            *batches.notes,
        ),
        remarks=remarks,
        warnings=(*remarks, *_told_by_items(parts, names)),
        batches=batches,
        fingerprint=_fingerprint(items, clips, datasets, repeats),
        problem=problem,
        dataset_toml=data.dataset.read_text(encoding="utf-8-sig") if data.dataset is not None else None,
    )


def _part(dataset: Dataset, reading: Reading, number: int, geometry: Geometry, options: ProbeOptions) -> Part:
    """Assign a dataset's items to buckets; an error names the dataset."""
    try:
        return assign_buckets(dataset, reading, number, geometry=geometry, options=options)
    except DataError as error:
        if not dataset.name:
            raise
        raise DataError(f"{dataset.prefix}{error}") from error


def _hold_out(clips: Sequence[Clip], count: int, names: Sequence[str]) -> set[int]:
    """Indices of the items that are evaluated. Windows of an item stay together: they overlap."""
    if count and count >= len(clips):
        raise DataError(
            f"`eval_num_items` {count} leaves nothing to train on: there are {plural(len(clips), 'usable item')}"
        )
    if not clips:
        raise DataError("no usable item")
    if not count:
        return set()

    def digest(clip: Clip) -> bytes:
        return hashlib.sha256(f"{names[clip.index]}\0{clip.caption}".encode(errors="surrogateescape")).digest()

    return {clip.index for clip in sorted(clips, key=digest)[:count]}


def _share_out(parts: Sequence[Part], held_out: frozenset[int]) -> tuple[list[Clip], list[Clip], list[float]]:
    """Training clips, evaluation clips, and how often the clips of each dataset come in an epoch."""
    train = [[clip for clip in part.clips if item_of(clip.index) not in held_out] for part in parts]
    repeats = repeats_of([part.dataset for part in parts], [len(clips) for clips in train])
    clips = [
        clip if times == 1.0 else replace(clip, repeats=times)
        for some, times in zip(train, repeats, strict=True)
        for clip in some
    ]
    # Always measured in the same bucket, with the first caption: others would change what the loss is of.
    evaluated = apart(
        replace(cut_to(clip, clip.bucket), captions=())
        for part in parts
        for clip in part.clips
        if item_of(clip.index) in held_out
    )
    return clips, evaluated, repeats


def _too_many_unusable(items: Sequence[ItemReport], allowed: int) -> DataError | None:
    """The error if more items cannot be used than are allowed."""
    rejected = [
        f"{shown(item.name)}: {item.reason}{f' ({item.where})' if item.where else ''}"
        for item in items
        if item.use == "rejected"
    ]
    if len(rejected) <= allowed:
        return None
    way_out = "; repair them"
    if len(rejected) < len(items):
        way_out = (
            f" and `max_bad_samples` allows {allowed}; repair or remove them, or leave them out with "
            f"--max_bad_samples {len(rejected)}"
        )
    if any(item.status == "caption_missing" for item in items):
        way_out += (
            "; --caption_missing empty trains without captions where there are none, and skip leaves such files out"
        )
    return DataError(f"{len(rejected)} of {plural(len(items), 'file')} cannot be used{way_out}", rejected)


def _reports(
    parts: Sequence[Part], clips: Sequence[Clip], held_out: frozenset[int], names: Sequence[str]
) -> Iterator[ItemReport]:
    of_item: dict[int, list[Clip]] = defaultdict(list)
    for clip in clips:
        of_item[item_of(clip.index)].append(clip)
    seen: set[str] = set()  # texts: hashing a path takes ten times as long
    for part in parts:
        for entry in part.probed:
            item, first, path = entry.item, entry.same_as, str(entry.item.path)
            yield report_item(
                entry,
                of_item.get(item.index, ()),
                part,
                name=names[item.index],
                held_out=item.index in held_out,
                same_as=names[first.index] if first is not None else None,
                seen=path in seen,
            )
            seen.add(path)


def _unused(parts: Sequence[Part]) -> Iterator[str]:
    """Notes on listed buckets that no clip is in."""
    for part in parts:
        data = part.dataset.data
        used = {bucket for clip in part.clips for bucket in clip.buckets}
        unused = [bucket_text(bucket) for bucket in part.buckets if bucket not in used]
        if (data.video_resolution_buckets or data.image_resolution_buckets) and used and unused:
            yield (
                f"{part.dataset.prefix}no clip is in {', '.join(unused)}: each goes to the longest bucket that it fills, and "
                "of these to the one of the nearest shape"
            )


def _fingerprint(
    items: Sequence[ItemReport], clips: Sequence[Clip], datasets: Sequence[Dataset], repeats: Sequence[float]
) -> str:
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(ascii(values).encode() + b"\n")  # the same in every Python, and quicker than JSON

    others = [(clip.index, clip.lower) for clip in clips if clip.lower]
    if others:
        add(others)
    for item in items:
        add(item.name, item.size_bytes, item.caption, item.bucket, item.use, item.examples, item.captions)
    for dataset, times in zip(datasets, repeats, strict=True):
        if dataset.name:  # one that has options of its own, which the run's cannot tell
            add(dataset.name, times, *(getattr(dataset.data, option) for option in CRITICAL))
    return digest.hexdigest()


def _remarks(parts: Sequence[Part], names: Sequence[str]) -> Iterator[str]:
    """Warnings of readers, and files that another library decodes than the one that was asked for."""
    for part in parts:
        prefix = part.dataset.prefix
        yield from (f"{prefix}{text}" for text in (*part.dataset.warnings, *part.reading.warnings))
        against = [f"{names[entry.item.index]} ({entry.against})" for entry in part.probed if entry.against]
        if against:
            backend = part.dataset.data.video_backend
            yield f"{prefix}{counted(against, f'decoded by PyAV, since {backend} may show other pixels')}"


def _told_by_items(parts: Sequence[Part], names: Sequence[str]) -> Iterator[str]:
    """One sentence for each kind of oddity, with a count and the first names."""
    for part in parts:
        for many, one, found in _oddities(part, names):
            if found:
                yield f"{part.dataset.prefix}{counted(found, many, one)}"


def _oddities(part: Part, names: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Kinds of warnings: the plural, the singular, and the names of the items."""
    clips, target_fps = first_of_items(part.clips), part.target_fps
    yield (
        "cannot be used and are left out",
        "cannot be used and is left out",
        [f"{names[index]}: {why.reason}" for index, why in part.unusable.items() if why.status != "skipped"],
    )
    yield "have no caption", "has no caption", [names[clip.index] for clip in clips if not clip.caption]
    yield (
        f"are slower than {target_fps:g} fps and trained at their own rate",
        f"is slower than {target_fps:g} fps and trained at its own rate",
        [
            f"{names[clip.index]} ({clip.source_fps:.4g} fps)"
            for clip in clips
            if clip.kind == "video" and is_slower(clip.source_fps, target_fps)
        ],
    )
    yield (
        "are smaller than their buckets and enlarged",
        "is smaller than its bucket and enlarged",
        [f"{names[clip.index]} ({scale_of(clip):.3g} x)" for clip in clips if is_enlarged(clip)],
    )
    listed: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for clip in clips:
        listed[(str(clip.path), clip.all_captions)].append(clip.index)
    yield (
        "are listed more than once",
        "is listed more than once",
        [names[indices[0]] for indices in listed.values() if len(indices) > 1],
    )
