"""Survey of a run's data into its plan: a status for every item, and the training clips. Imports no torch."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from finetrainers.config.facts import MEDIA
from finetrainers.config.geometry import Geometry
from finetrainers.config.root import DATA, TrainConfig
from finetrainers.config.sections import DataSection
from finetrainers.utils.process_state import gc_paused
from finetrainers.utils.reading import read_text
from finetrainers.utils.text import plural, quoted

from ..buckets.bucket_choice import named_buckets
from ..buckets.buckets import bucket_text
from ..buckets.clip import Clip, cut_to
from ..buckets.windows import count_used_frames, item_index, non_overlapping
from ..reading.datasets import Dataset, epoch_repeats, media_dir, read_all, read_datasets
from ..reading.items import DataError, Item, tables_in
from ..reading.sources.captions import clean_caption
from ..reading.sources.masks import MASK
from ..reading.sources.rows import printable_name, summarize_items
from .assign_buckets import Part, assign_buckets
from .batch_counts import count_batches
from .item_report import ItemReport, report_item
from .masks import describe_masks
from .plan import FINGERPRINTED, DatasetPlan
from .probe_all import ProbeOptions
from .usage import usage_warnings

_MAX_NAMES = 5


def survey_dataset(config: TrainConfig, geometry: Geometry, *, options: ProbeOptions | None = None) -> DatasetPlan:
    """Return the plan of the configured data, even if it cannot be trained on: all is read, probed and bucketed.

    Clips are sampled at `target_fps`, by default the model's rate, and slower clips at their own rate. Held-out items
    are chosen by a hash of name and caption, so adding data does not reshuffle them. With sliding windows an item is
    held out with all of its windows, and evaluated on those that do not overlap.

    Args:
        config: names the data.
        geometry: of the model: its sizes and frame rate.
        options: how closely to probe the files, or None to read headers unless facts are stored.

    Raises:
        DataError: metadata are wrong, or buckets are illegal.
    """
    with gc_paused():
        return _survey(config, geometry, options or ProbeOptions())


def _survey(config: TrainConfig, geometry: Geometry, options: ProbeOptions) -> DatasetPlan:
    data = config.data
    datasets = read_datasets(data)
    readings = read_all(datasets, media_dir(config))
    parts: list[Part] = []
    for number, (dataset, reading) in enumerate(zip(datasets, readings, strict=True)):
        if dataset.held_out:
            dataset = _with_buckets_of(parts, dataset)
        try:
            parts.append(assign_buckets(dataset, reading, number, geometry=geometry, options=options))
        except DataError as error:
            if not dataset.name:
                raise
            raise DataError(f"{dataset.prefix}{error}", kind=error.kind) from error
    buckets = tuple(dict.fromkeys(bucket for part in parts for bucket in part.buckets))
    named_buckets("bucket_keep_prob", data.bucket_keep_prob, buckets)
    named_buckets("bucket_batch_sizes", config.dataloader.bucket_batch_sizes, buckets)
    usable = [entry.item for part in parts for entry in part.probed if entry.unusable is None]
    evaluated_items = [item.index for part in parts if part.dataset.held_out for item in part.reading.items]
    held_out = _hold_out(usable, data.eval_num_items) | frozenset(evaluated_items)
    clips, evaluated, repeats = _split_clips(parts, held_out)
    _report(parts, (*clips, *evaluated), held_out)
    items = tuple(report for part in parts for report in part.reports)
    batches = count_batches(clips, config)

    def collect(messages: Callable[[Part], Iterable[str]]) -> list[str]:
        return [f"{part.dataset.prefix}{text}" for part in parts for text in messages(part)]

    remarks = (*collect(_remarks), *batches.warnings)
    return DatasetPlan(
        items=items,
        clips=tuple(clips),
        eval_clips=tuple(evaluated),
        buckets=buckets,
        notes=(
            *collect(attrgetter("notes")),
            *collect(lambda part: describe_masks(part.reports, part.dataset.data.unmasked_weight)),
            *collect(_unused_bucket_notes),
            *collect(_unread_column_notes),
            *batches.notes,
        ),
        remarks=remarks,
        warnings=(*remarks, *collect(_oddities)),
        batches=batches,
        fingerprint=_fingerprint(items, clips, parts, repeats),
        chosen=_chosen_options(parts[0], config) if data.dataset is None else {},
        problem=_problem(items, data, has_batches=batches.any),
        dataset_toml=read_text(data.dataset) if data.dataset is not None else None,
    )


def _with_buckets_of(parts: Sequence[Part], dataset: Dataset) -> Dataset:
    """Return a dataset that is only evaluated, with the buckets of the training clips, unless it has windows."""
    if dataset.data.sliding_window_size is not None:
        return dataset
    buckets = dict.fromkeys(bucket for part in parts for bucket in part.buckets)
    sizes = {
        "video_resolution_buckets": [bucket for bucket in buckets if bucket[0] > 1],
        "image_resolution_buckets": [bucket[1:] for bucket in buckets if bucket[0] == 1],
    }
    update = {**sizes, "resolutions": [], "frame_buckets": []}
    return replace(dataset, data=dataset.data.model_copy(update=update))


def _hold_out(items: Sequence[Item], count: int) -> frozenset[int]:
    """Return the indices of the items that are evaluated, or none if no item would be left to train on."""

    def digest(item: Item) -> bytes:
        return hashlib.sha256(f"{item.name}\0{item.caption}".encode(errors="surrogateescape")).digest()

    if not 0 < count < len(items):
        return frozenset()
    return frozenset(item.index for item in sorted(items, key=digest)[:count])


def _split_clips(parts: Sequence[Part], held_out: frozenset[int]) -> tuple[list[Clip], list[Clip], list[float]]:
    """Return training clips, evaluation clips, and how often the clips of each dataset come in an epoch."""
    trained = [part for part in parts if not part.dataset.held_out]
    train = [[clip for clip in part.clips if item_index(clip.index) not in held_out] for part in trained]
    repeats = epoch_repeats([part.dataset for part in trained], [len(clips) for clips in train])
    clips = [
        clip if times == 1.0 else replace(clip, repeats=times)
        for dataset_clips, times in zip(train, repeats, strict=True)
        for clip in dataset_clips
    ]
    # Always evaluated in the same bucket, with the first caption, so that losses are comparable.
    evaluated = non_overlapping(
        replace(cut_to(clip, clip.bucket), captions=())
        for part in parts
        for clip in part.clips
        if item_index(clip.index) in held_out
    )
    return clips, evaluated, [*repeats, *[1.0] * (len(parts) - len(trained))]


def _problem(items: Sequence[ItemReport], data: DataSection, *, has_batches: bool) -> DataError | None:
    """Return the reason why the data cannot be trained on, or None if it can."""
    rejected = [
        f"{printable_name(item.name)}: {item.reason}{f' ({item.where})' if item.where else ''}"
        for item in items
        if item.use == "rejected"
    ]
    usable = sum(item.status == "used" for item in items)
    if len(rejected) > data.max_bad_samples:
        remedy = "; repair them"
        if len(rejected) < len(items):
            remedy = (
                f" and `max_bad_samples` allows {data.max_bad_samples}; repair or remove them, or leave them out with "
                f"--max_bad_samples {len(rejected)}"
            )
        if any(item.status == "caption_missing" for item in items):
            remedy += (
                "; --caption_missing empty trains without captions where there are none, and skip leaves such files out"
            )
            if data.dataset_file is None and data.data_root is not None and (tables := tables_in(data.data_root)):
                remedy += f"; if {tables[0].name} has the captions, give --dataset_file {quoted(str(tables[0]))}"
        return DataError(f"{len(rejected)} of {plural(len(items), 'file')} cannot be used{remedy}", rejected)
    if 0 < data.eval_num_items >= usable:
        message = f"leaves nothing to train on: there are {plural(usable, 'usable item')}"
        return DataError(f"`eval_num_items` {data.eval_num_items} {message}", kind="too_large")
    if not usable:
        return DataError("no usable item", kind="not_found")
    if not has_batches:
        return DataError(
            "nothing to train on: no bucket has clips for a whole batch; lower --batch_size, or leave out --epoch_end "
            "drop",
            kind="conflict",
        )
    return None


def _report(parts: Sequence[Part], clips: Sequence[Clip], held_out: frozenset[int]) -> None:
    """Report on every item."""
    examples = Counter(item_index(clip.index) for clip in clips)
    used_frames = count_used_frames(clips)
    seen: set[str] = set()  # strings, since hashing a path takes ten times as long
    for part in parts:
        for entry in part.probed:
            index, path = entry.item.index, str(entry.item.path)
            report = report_item(
                entry,
                dataset=part.dataset.name,
                target_fps=part.target_fps,
                examples=examples[index],
                used_frames=used_frames.get(index, 0),
                held_out=index in held_out,
                seen=path in seen,
                blank=clean_caption("", part.dataset.data),
            )
            part.reports.append(report)
            seen.add(path)


def _unused_bucket_notes(part: Part) -> Iterator[str]:
    """Yield a note on listed buckets that no clip is in."""
    data = part.dataset.data
    if part.dataset.held_out:  # it has those of the training clips
        return
    used_buckets = {bucket for clip in part.clips for bucket in clip.buckets}
    unused = [bucket_text(bucket) for bucket in part.buckets if bucket not in used_buckets]
    if (data.video_resolution_buckets or data.image_resolution_buckets) and used_buckets and unused:
        yield (
            f"no clip is in {', '.join(unused)}: each goes to the longest bucket that it fills, and of these to the "
            "one of the nearest shape"
        )


def _unread_column_notes(part: Part) -> Iterator[str]:
    """Yield notes on columns of further media that the model does not take."""
    columns = {column for item in part.reading.items for column in item.extra}
    for column in columns.intersection(MEDIA):
        yield f"the column {column!r} is not read, since this checkpoint takes no {column}"
    # Journals of containers have the column of masks even if masks are read from a different column.
    if MASK in columns and part.dataset.data.mask_column != MASK:
        hint = f"; --mask_column {MASK} reads masks of archives" if part.dataset.data.mask_column is None else ""
        yield f"the column {MASK!r} is not read, so no loss is masked{hint}"


def _chosen_options(part: Part, config: TrainConfig) -> dict[str, Any]:
    """Return the options that list the buckets which were chosen from the clips, or none if they were not.

    A resumed run has those of its run.
    """
    if config.has_chosen_sizes:
        return {name: config.get(name) for name, source in config.chosen.items() if source == DATA}
    videos = [bucket for bucket in part.buckets if bucket[0] > 1]
    images = [bucket[1:] for bucket in part.buckets if bucket[0] == 1]
    has_short_video = any(clip.kind == "video" and clip.bucket[0] == 1 for clip in part.clips)
    if not part.has_chosen_buckets or has_short_video:  # a list would not give it the bucket of images
        return {}
    options: dict[str, Any] = {"video_resolution_buckets": videos, "image_resolution_buckets": images}
    return {name: sizes for name, sizes in options.items() if sizes}


def _fingerprint(
    items: Sequence[ItemReport], clips: Sequence[Clip], parts: Sequence[Part], repeats: Sequence[float]
) -> str:
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(ascii(values).encode() + b"\n")  # the same in every Python, and faster than JSON

    fallthroughs = [(clip.index, clip.lower) for clip in clips if clip.lower]
    if fallthroughs:
        add(fallthroughs)
    for item in items:
        add(item.name, item.size_bytes, item.caption, item.bucket, item.use, item.examples, item.captions)
    entries = [entry for part in parts for entry in part.probed]
    further = [[(name, medium.item.name, medium.size_bytes) for name, medium in entry.further] for entry in entries]
    if any(further):
        add(further)
    masks = [entry.mask and (entry.mask.item.name, entry.mask.size_bytes) for entry in entries]
    if any(masks):
        add("masks", masks)
    for dataset, times in zip((part.dataset for part in parts), repeats, strict=True):
        if dataset.name:  # it has its own options, which the run's options do not contain
            add(dataset.name, times, *(getattr(dataset.data, option) for option in FINGERPRINTED))
    return digest.hexdigest()


def _remarks(part: Part) -> Iterator[str]:
    """Yield warnings of readers, of lost parts of clips, and of files that the configured library does not decode."""
    yield from (*part.dataset.warnings, *part.reading.warnings)
    yield from _caption_warnings(part)
    yield from usage_warnings(part.reports, part.dataset.data)
    fallbacks = [f"{entry.item.name} ({entry.fallback_reason})" for entry in part.probed if entry.fallback_reason]
    if fallbacks:
        yield summarize_items(
            fallbacks, f"decoded by PyAV, since {part.dataset.data.video_backend} may show other pixels"
        )


def _caption_warnings(part: Part) -> Iterator[str]:
    """Yield a warning with the number of usable items that train without a caption."""
    data = part.dataset.data
    items = [entry.item for entry in part.probed if entry.unusable is None]
    blank = clean_caption("", data)  # the trigger word, if there is one
    names = [printable_name(item.name) for item in items if item.captions == (blank,)]
    if not names:
        return
    verb = "has no caption and trains" if len(names) == 1 else "have no caption and train"
    caption = f"with only the trigger word {quoted(blank)}" if blank else "with an empty one"
    remedy = "add captions"
    if len(names) < len(items):
        more = ", ..." if len(names) > _MAX_NAMES else ""
        remedy += f" to {', '.join(names[:_MAX_NAMES])}{more}, or leave these out with --caption_missing skip"
    share = f"{len(names)} of {plural(len(items), 'item')} ({len(names) / len(items):.0%})"
    yield f"{share} {verb} {caption}; {remedy}"


def _oddities(part: Part) -> Iterator[str]:
    """Yield one sentence for each kind of oddity, with a count and the first names."""
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
        (
            f"are slower than {target_fps:g} fps and trained at their own rate",
            f"is slower than {target_fps:g} fps and trained at its own rate",
            [f"{item.name} ({item.source_fps:.4g} fps)" for item in items if "slower" in item.marks],
        ),
        (
            "are smaller than their buckets and enlarged",
            "is smaller than its bucket and enlarged",
            [
                f"{item.name} ({item.scale:.3g}x)"
                for item in sorted(items, key=lambda item: -(item.scale or 0))
                if "enlarged" in item.marks
            ],
        ),
        (
            "are listed more than once",
            "is listed more than once",
            [names[0] for names in listed.values() if len(names) > 1],
        ),
    )
    yield from (summarize_items(names, plural_text, singular) for plural_text, singular, names in kinds if names)
