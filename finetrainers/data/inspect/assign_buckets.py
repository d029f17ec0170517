"""Assigns the items of one dataset to buckets, or says why an item has none. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from finetrainers.config.checks.windows import window_problems
from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataSection
from finetrainers.utils.text import plural

from ..buckets.bucket_choice import BucketSet, choose_buckets
from ..buckets.buckets import Bucket, choose_bucket, cover_size, filled_resolution, legal_length, lower_buckets
from ..buckets.clip import Clip, Further, Mask
from ..buckets.frames import SAME_RATE, num_available, playback_fps, select_frames
from ..buckets.windows import cut_windows, describe_windows, with_window_buckets
from ..reading.datasets import Dataset
from ..reading.items import DataError, Kind, Reading
from ..reading.media import MAX_FRAME_PIXELS
from ..reading.sources.rows import printable_name
from ..reading.status import Unusable
from ..video.backends import backend_of, reason_against
from .file_facts import FileFacts, default_directory
from .item_report import DISTORTED, ItemReport
from .masks import probe_masks
from .probe import Probe
from .probe_all import ProbedItem, ProbeOptions, probe_items

#: The bucket of a kind, usable frames, height and width, and those among which it was chosen.
Choose: TypeAlias = Callable[[Kind, int, int, int], tuple[Bucket | None, Sequence[Bucket]]]


@dataclass
class Part:
    """The items of one dataset, and what is cut from them.

    Attributes:
        dataset: its options.
        reading: its items as they were read.
        target_fps: frame rate that its clips are to have.
        probed: all items, in order.
        clips: what is cut from them, in order; with sliding windows several of one item.
        buckets: those in use, given or chosen: for videos, then for images.
        notes: what was decided for the user.
        reports: on all items, in order, once it is known which are held out.
    """

    dataset: Dataset
    reading: Reading
    target_fps: float
    probed: list[ProbedItem]
    clips: list[Clip]
    buckets: list[Bucket]
    notes: list[str]
    reports: list[ItemReport] = field(default_factory=list)


def assign_buckets(
    dataset: Dataset, reading: Reading, number: int, *, geometry: Geometry, options: ProbeOptions
) -> Part:
    """Probe the items of a dataset, and give each a bucket.

    Args:
        dataset: its options.
        reading: its items.
        number: of the dataset in the run.
        geometry: which sizes the model takes, and its frame rate.
        options: how closely to look at the files.

    Raises:
        DataError: illegal buckets or windows.
    """
    data, target_fps = dataset.data, dataset.data.target_fps or geometry.fps
    problems = [f"{option}: {problem}" for option, problem in window_problems(data, geometry)]
    if problems:
        raise DataError("windows that cannot be cut", problems)
    probed = _probe(reading, data, options)
    usable = [entry for entry in probed if entry.unusable is None]
    backend = backend_of(data.video_backend)
    for entry in usable:
        for one in (entry, *dict(entry.further).values(), entry.mask):
            if one is not None:
                _set_rate(one, data=data, target_fps=target_fps, backend=backend)
    of_window = with_window_buckets(data)
    sizes: dict[Kind, list[Bucket]] = {"video": [], "image": []}
    for entry in usable:
        sizes[entry.item.kind].append((entry.available, entry.header.height, entry.header.width))
    choice = choose_buckets(of_window, geometry, sizes)
    clips: list[Clip] = []

    @cache  # many clips are alike
    def choose(kind: Kind, frames: int, height: int, width: int) -> tuple[Bucket | None, Sequence[Bucket]]:
        buckets = filled_resolution(height, width, choice.by_kind[kind])
        return choose_bucket(frames, height, width, buckets), buckets

    for entry in usable:
        clip = _clip(entry, number, data=of_window, geometry=geometry, choice=choice, choose=choose)
        if isinstance(clip, Unusable):
            entry.unusable = clip
        else:
            entry.clip, *others = cut_windows(clip, entry.available, data=data, geometry=geometry)
            clips += [entry.clip, *others]
    available = {entry.item.index: entry.available for entry in usable}
    notes = [*choice.notes, *describe_windows(clips, available, data=data, geometry=geometry)]
    return Part(dataset, reading, target_fps, probed, clips, list(choice.all), notes)


def _probe(reading: Reading, data: DataSection, options: ProbeOptions) -> list[ProbedItem]:
    """Return all items with what is known of their files, those of further media too."""
    root = data.data_root or (data.dataset_file.parent if data.dataset_file else Path())
    facts = FileFacts.of_dataset(data.probe_dir or default_directory(), root, recall=options.recall)
    probed = probe_items(reading.items, facts=facts, max_pixels=data.max_pixels, options=options)
    options = replace(options, duplicates=False)
    for name, items in reading.further.items():
        others = probe_items(items, facts=facts, max_pixels=data.max_pixels, options=options)
        for entry, other in zip(probed, others, strict=True):
            entry.further += ((name, other),)
            entry.unusable = entry.unusable or _mismatch(entry, name, other)
    probe_masks(
        probed, reading.masks, facts=facts, max_pixels=data.max_pixels, options=options, lowest=data.unmasked_weight
    )
    facts.tidy()
    return probed


def _too_short(entry: ProbedItem, needed: int, *, data: DataSection, geometry: Geometry) -> Unusable:
    """Why a clip has no bucket, and which length it would have."""
    found, length, ways = entry.header, legal_length(entry.available, geometry), []
    windows = data.sliding_window_size is not None
    if length > 1:
        ways.append(f"lower `sliding_window_size` to {length}" if windows else f"add a bucket of {length} frames")
    if found.frames >= needed > entry.available:
        ways.append("raise `target_fps`")
    ways.append("remove the file")
    has = f"{plural(found.frames, 'frame')} at {found.fps:.4g} fps"
    if (entry.available, entry.fps) != (found.frames, found.fps):
        has += f" give {entry.available} at {entry.fps:.4g} fps"
    needs = f"{'a window' if windows else 'the shortest bucket'} needs {needed}"
    shortest = "" if length > 1 else f"; no video of this model has less than {geometry.temporal + 1}"
    return Unusable(
        "too_short",
        f"too short: {has}, and {needs}{shortest}; {', '.join(ways[:-1])}{' or ' * (len(ways) > 1)}{ways[-1]}",
    )


def _set_rate(entry: ProbedItem, *, data: DataSection, target_fps: float, backend: str) -> None:
    """Set frame rate, number of frames, and decoder: the backend, if it shows the pixels that PyAV shows."""
    if entry.item.kind == "image":
        entry.fps, entry.available = target_fps, 1
        return
    header = entry.header
    entry.fps = playback_fps(header.fps, target_fps)
    entry.available = header.frames
    if data.frame_selection != "uniform":
        entry.available = num_available(header.frames, source_fps=header.fps, fps=entry.fps)
    entry.against = reason_against(entry.item.path, backend)
    if entry.against is None:
        entry.backend = backend


def _mismatch(entry: ProbedItem, name: str, other: ProbedItem) -> Unusable | None:
    """Why a further medium cannot be used with its clip: it must have a frame for each of the clip's."""
    ours, theirs, what = entry.header, other.header, f"its {name} {printable_name(other.item.name)}"
    if other.unusable is not None:
        status = "missing" if other.unusable.status == "skipped" else other.unusable.status
        return Unusable(status, f"{what}: {other.unusable.reason}")
    if other.item.kind != entry.item.kind:
        return Unusable("mismatch", f"{what} is of another kind; give a file of type {entry.item.kind}")
    if theirs.frames != ours.frames or abs(theirs.fps - ours.fps) > SAME_RATE * ours.fps:
        has, needs = (f"{plural(one.frames, 'frame')} at {one.fps:.4g} fps" for one in (theirs, ours))
        way_out = "give one with a frame for each of the clip's, at its rate"
    elif abs(theirs.width / theirs.height * ours.height / ours.width - 1) > DISTORTED:
        has, needs = (f"{one.width}x{one.height} pixels" for one in (theirs, ours))
        way_out = "give one of the clip's aspect ratio"
    else:
        return None
    return Unusable("mismatch", f"{what} has {has}, and the clip {needs}; {way_out}")


def _clip(
    entry: ProbedItem, number: int, *, data: DataSection, geometry: Geometry, choice: BucketSet, choose: Choose
) -> Clip | Unusable:
    """Return the clip with its bucket, or the reason why it has none."""
    item, found = entry.item, entry.header
    resolutions = choice.by_kind[item.kind]
    if not resolutions:
        wanted = "HxW in `image_resolution_buckets`" if item.kind == "image" else "FxHxW in `video_resolution_buckets`"
        return Unusable("no_bucket", f"there is no bucket for {item.kind}s; add one, {wanted}")
    bucket, buckets = choose(item.kind, entry.available, found.height, found.width)
    if bucket is None:
        return _too_short(entry, min(buckets)[0], data=data, geometry=geometry)
    too_narrow = _too_narrow(found, bucket, data)
    if too_narrow is not None:
        return too_narrow
    return Clip(
        index=item.index,
        path=item.path,
        caption=item.caption,
        kind=item.kind,
        bucket=bucket,
        fps=_rate(entry, bucket, data),
        num_frames=found.frames,
        source_fps=found.fps,
        width=found.width,
        height=found.height,
        reshape_mode=data.video_reshape_mode,
        frame_selection=data.frame_selection,
        lower=tuple(_lower(entry, bucket, [one for alike in resolutions for one in alike], data)),
        dataset=number,
        is_variable=found.is_variable,
        backend=entry.backend,
        captions=item.captions if len(item.captions) > 1 else (),
        further=tuple(Further(name, other.item.path, other.backend) for name, other in entry.further),
        mask=_mask(entry, data, geometry),
    )


def _mask(entry: ProbedItem, data: DataSection, geometry: Geometry) -> Mask | None:
    if (mask := entry.mask) is None:
        return None
    grid = geometry.temporal, geometry.spatial
    return Mask(mask.item.path, mask.item.kind, grid, data.unmasked_weight, mask.backend)


def _too_narrow(found: Probe, bucket: Bucket, data: DataSection) -> Unusable | None:
    """Why a picture cannot be resized until it covers its bucket, if it cannot."""
    if data.video_reshape_mode == "none":
        return None
    height, width = cover_size(found.height, found.width, *bucket[1:])
    if height * width <= MAX_FRAME_PIXELS:
        return None
    return Unusable(
        "too_large",
        f"too narrow: {found.width}x{found.height} pixels, resized until they cover {bucket[2]}x{bucket[1]}, are {width}x{height}, "
        f"over the limit of {MAX_FRAME_PIXELS} pixels; crop the file, or remove it",
    )


def _rate(entry: ProbedItem, bucket: Bucket, data: DataSection) -> float:
    """Return the frame rate of the clip that is cut to a bucket."""
    found, mode = entry.header, data.frame_selection
    if entry.item.kind == "image" or mode != "uniform":
        return entry.fps
    return select_frames(found.frames, source_fps=found.fps, fps=entry.fps, length=bucket[0], mode=mode)[1]


def _lower(
    entry: ProbedItem, bucket: Bucket, buckets: Sequence[Bucket], data: DataSection
) -> Iterator[tuple[Bucket, float]]:
    """Yield the lower buckets that a clip may fall through to, each with its rate, until one keeps all of its clips."""
    if not data.bucket_keep_prob:
        return
    keep = dict(data.bucket_keep_prob)
    height, width = entry.header.height, entry.header.width
    for lower in lower_buckets(bucket, height, width, buckets, shorter=data.bucket_fall_shorter):
        if keep.get(bucket, 1.0) == 1.0:
            return
        yield lower, _rate(entry, lower, data)
        bucket = lower
