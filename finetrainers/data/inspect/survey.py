"""Surveys the data of a run and makes its plan: a status for every item, and the training clips. Imports no torch."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from finetrainers.config.facts import MEDIA
from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection
from finetrainers.utils.process_state import gc_paused
from finetrainers.utils.text import plural, quoted

from ..buckets.bucket_choice import named_buckets
from ..buckets.buckets import bucket_text
from ..buckets.clip import Clip, cut_to
from ..buckets.windows import item_index, non_overlapping
from ..reading.datasets import Dataset, epoch_repeats, media_dir, read_all, read_datasets
from ..reading.items import TABLES, DataError, Item, Reading
from ..reading.sources.masks import MASK
from ..reading.sources.rows import printable_name, summarize_items
from .assign_buckets import Part, assign_buckets
from .batch_counts import count_batches
from .item_report import ItemReport, report_item
from .masks import describe_masks
from .plan import FINGERPRINTED, DatasetPlan
from .probe_all import ProbeOptions


def survey_dataset(config: TrainConfig, geometry: Geometry, *, options: ProbeOptions | None = None) -> DatasetPlan:
    """Return the plan of the configured data, whether it can be trained on or not: all of it is read, probed and bucketed.

    Clips are sampled at `target_fps`, by default the model's own rate, and slower clips at their own. Held-out items
    are chosen by a hash of name and caption, so adding data does not reshuffle them. With sliding windows an item is
    held out with all of them, and evaluated on those that do not overlap.

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
    parts = [
        _part(dataset, reading, number, geometry, options)
        for number, (dataset, reading) in enumerate(zip(datasets, readings, strict=True))
    ]
    buckets = tuple(dict.fromkeys(bucket for part in parts for bucket in part.buckets))
    named_buckets("bucket_keep_prob", data.bucket_keep_prob, buckets)
    named_buckets("bucket_batch_sizes", config.dataloader.bucket_batch_sizes, buckets)
    usable = [entry.item for part in parts for entry in part.probed if entry.unusable is None]
    held_out = _hold_out(usable, data.eval_num_items)
    clips, evaluated, repeats = _share_out(parts, held_out)
    _report(parts, (*clips, *evaluated), held_out)
    items = tuple(report for part in parts for report in part.reports)
    batches = count_batches(clips, config)

    def told(of_part: Callable[[Part], Iterable[str]]) -> list[str]:
        return [f"{part.dataset.prefix}{text}" for part in parts for text in of_part(part)]

    remarks = (*told(_remarks), *batches.warnings)
    return DatasetPlan(
        items=items,
        clips=tuple(clips),
        eval_clips=tuple(evaluated),
        buckets=buckets,
        notes=(*told(attrgetter("notes")), *told(_masks), *told(_unused), *told(_not_read), *batches.notes),
        remarks=remarks,
        warnings=(*remarks, *told(_oddities)),
        batches=batches,
        fingerprint=_fingerprint(items, clips, parts, repeats),
        problem=_problem(items, data, has_batches=batches.any),
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


def _hold_out(items: Sequence[Item], count: int) -> frozenset[int]:
    """Indices of the items that are evaluated; none if nothing would be left to train on."""

    def digest(item: Item) -> bytes:
        return hashlib.sha256(f"{item.name}\0{item.caption}".encode(errors="surrogateescape")).digest()

    if not 0 < count < len(items):
        return frozenset()
    return frozenset(item.index for item in sorted(items, key=digest)[:count])


def _share_out(parts: Sequence[Part], held_out: frozenset[int]) -> tuple[list[Clip], list[Clip], list[float]]:
    """Training clips, evaluation clips, and how often the clips of each dataset come in an epoch."""
    train = [[clip for clip in part.clips if item_index(clip.index) not in held_out] for part in parts]
    repeats = epoch_repeats([part.dataset for part in parts], [len(clips) for clips in train])
    clips = [
        clip if times == 1.0 else replace(clip, repeats=times)
        for some, times in zip(train, repeats, strict=True)
        for clip in some
    ]
    # Always measured in the same bucket, with the first caption: others would change what the loss is of.
    evaluated = non_overlapping(
        replace(cut_to(clip, clip.bucket), captions=())
        for part in parts
        for clip in part.clips
        if item_index(clip.index) in held_out
    )
    return clips, evaluated, repeats


def _problem(items: Sequence[ItemReport], data: DataSection, *, has_batches: bool) -> DataError | None:
    """Why the data cannot be trained on."""
    rejected = [
        f"{printable_name(item.name)}: {item.reason}{f' ({item.where})' if item.where else ''}"
        for item in items
        if item.use == "rejected"
    ]
    usable = sum(item.status == "used" for item in items)
    if len(rejected) > data.max_bad_samples:
        way_out = "; repair them"
        if len(rejected) < len(items):
            way_out = (
                f" and `max_bad_samples` allows {data.max_bad_samples}; repair or remove them, or leave them out with "
                f"--max_bad_samples {len(rejected)}"
            )
        if any(item.status == "caption_missing" for item in items):
            way_out += (
                "; --caption_missing empty trains without captions where there are none, and skip leaves such files out"
            )
            if (table := _table_in(data)) is not None:
                way_out += f"; if {table.name} has the captions, give --dataset_file {quoted(str(table))}"
        return DataError(f"{len(rejected)} of {plural(len(items), 'file')} cannot be used{way_out}", rejected)
    if 0 < data.eval_num_items >= usable:
        left = f"leaves nothing to train on: there are {plural(usable, 'usable item')}"
        return DataError(f"`eval_num_items` {data.eval_num_items} {left}")
    if not usable:
        return DataError("no usable item")
    if not has_batches:
        return DataError(
            "nothing to train on: no bucket has clips for a whole batch; lower --batch_size, or leave out --epoch_end drop"
        )
    return None


def _table_in(data: DataSection) -> Path | None:
    """Return a file in the folder of clips that may list them, and is not read because nobody names it."""
    if data.dataset_file is not None or data.data_root is None or not data.data_root.is_dir():
        return None
    return next((one for one in sorted(data.data_root.iterdir()) if one.suffix in TABLES and one.is_file()), None)


def _report(parts: Sequence[Part], clips: Sequence[Clip], held_out: frozenset[int]) -> None:
    """Report on every item."""
    examples = Counter(item_index(clip.index) for clip in clips)
    seen: set[str] = set()  # texts: hashing a path takes ten times as long
    for part in parts:
        for entry in part.probed:
            index, path = entry.item.index, str(entry.item.path)
            report = report_item(
                entry,
                dataset=part.dataset.name,
                target_fps=part.target_fps,
                examples=examples[index],
                held_out=index in held_out,
                seen=path in seen,
            )
            part.reports.append(report)
            seen.add(path)


def _masks(part: Part) -> Iterator[str]:
    """Return a note on masks."""
    return describe_masks(part.reports, part.dataset.data.unmasked_weight)


def _unused(part: Part) -> Iterator[str]:
    """Yield a note on listed buckets that no clip is in."""
    data = part.dataset.data
    used = {bucket for clip in part.clips for bucket in clip.buckets}
    unused = [bucket_text(bucket) for bucket in part.buckets if bucket not in used]
    if (data.video_resolution_buckets or data.image_resolution_buckets) and used and unused:
        yield (
            f"no clip is in {', '.join(unused)}: each goes to the longest bucket that it fills, and of these to the one of "
            "the nearest shape"
        )


def _not_read(part: Part) -> Iterator[str]:
    """Notes on columns of further media that the model does not take."""
    found = {column for item in part.reading.items for column in item.extra}
    for column in found.intersection(MEDIA):
        yield f"the column {column!r} is not read, since this checkpoint takes no {column}"
    if MASK in found and part.dataset.data.mask_column != MASK:  # journals of containers have it whatever is read
        hint = f"; --mask_column {MASK} reads masks of archives" if part.dataset.data.mask_column is None else ""
        yield f"the column {MASK!r} is not read, so no loss is masked{hint}"


def _fingerprint(
    items: Sequence[ItemReport], clips: Sequence[Clip], parts: Sequence[Part], repeats: Sequence[float]
) -> str:
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(ascii(values).encode() + b"\n")  # the same in every Python, and quicker than JSON

    others = [(clip.index, clip.lower) for clip in clips if clip.lower]
    if others:
        add(others)
    for item in items:
        add(item.name, item.size_bytes, item.caption, item.bucket, item.use, item.examples, item.captions)
    entries = (entry for part in parts for entry in part.probed)
    further = [[(name, one.item.name, one.size_bytes) for name, one in entry.further] for entry in entries]
    if any(further):
        add(further)
    masks = [one.mask and (one.mask.item.name, one.mask.size_bytes) for part in parts for one in part.probed]
    if any(masks):
        add("masks", masks)
    for dataset, times in zip((part.dataset for part in parts), repeats, strict=True):
        if dataset.name:  # one that has options of its own, which the run's cannot tell
            add(dataset.name, times, *(getattr(dataset.data, option) for option in FINGERPRINTED))
    return digest.hexdigest()


def _remarks(part: Part) -> Iterator[str]:
    """Warnings of readers, and files that another library decodes than the one that was asked for."""
    yield from (*part.dataset.warnings, *part.reading.warnings)
    against = [f"{entry.item.name} ({entry.against})" for entry in part.probed if entry.against]
    if against:
        yield summarize_items(
            against, f"decoded by PyAV, since {part.dataset.data.video_backend} may show other pixels"
        )


def _oddities(part: Part) -> Iterator[str]:
    """One sentence for each kind of oddity, with a count and the first names."""
    items, target_fps = part.reports, part.target_fps
    listed: dict[object, list[str]] = defaultdict(list)
    for item in items:
        if item.status == "used":
            listed[str(item.path), item.captions or item.caption, (*item.further.values(),)].append(item.name)
    kinds: tuple[tuple[str, str, list[str]], ...] = (
        (
            "cannot be used and are left out",
            "cannot be used and is left out",
            [f"{item.name}: {item.reason}" for item in items if item.use == "rejected"],
        ),
        ("have no caption", "has no caption", [item.name for item in items if "no_caption" in item.marks]),
        (
            f"are slower than {target_fps:g} fps and trained at their own rate",
            f"is slower than {target_fps:g} fps and trained at its own rate",
            [f"{item.name} ({item.source_fps:.4g} fps)" for item in items if "slower" in item.marks],
        ),
        (
            "are smaller than their buckets and enlarged",
            "is smaller than its bucket and enlarged",
            [
                f"{item.name} ({max(item.bucket[1] / item.height, item.bucket[2] / item.width):.3g} x)"
                for item in items
                if item.bucket and "enlarged" in item.marks
            ],
        ),
        (
            "are listed more than once",
            "is listed more than once",
            [names[0] for names in listed.values() if len(names) > 1],
        ),
    )
    yield from (summarize_items(names, many, one) for many, one, names in kinds if names)
